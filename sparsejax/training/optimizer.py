"""AdamW with clipping, and learning-rate schedules, from optax."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from sparsejax.params import path_string


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule; the defaults are the published recipe (arXiv 2603.23198).

    Attributes:
      learning_rate: peak.
      schedule: "cosine" to `final_lr` x peak, "wsd" (warm-up, stable, decay: linear over the last
        `decay_share` of the steps), or "constant"; all after a linear warm-up.
      warmup_steps: None takes a tenth of the steps, at most 600.
      final_lr: last learning rate, as a share of the peak.
      decay_share: share of the steps that "wsd" decays over.
      weight_decay: on matrices only; norms and biases are left out.
      b1: decay of Adam's first moment.
      b2: decay of Adam's second moment.
      eps: Adam's epsilon.
      clip_norm: global gradient norm to clip to; 0 turns clipping off.
    """

    learning_rate: float = 1e-3
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int | None = None
    final_lr: float = 0.1
    decay_share: float = 0.2
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self):
        for name in ("learning_rate", "eps"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.schedule not in ("cosine", "wsd", "constant"):
            raise ValueError(
                f"schedule must be 'cosine', 'wsd' or 'constant', got {self.schedule!r}"
            )
        for name in ("final_lr", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("weight_decay", "clip_norm"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of update n (from 0) in a run of `steps` updates; the first is not 0."""
    peak, final = config.learning_rate, config.learning_rate * config.final_lr
    warmup = min(600, steps // 10) if config.warmup_steps is None else config.warmup_steps
    warmup = min(warmup, steps)
    rest = max(steps - warmup, 1)
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_lr)
    elif config.schedule == "wsd":
        decay = max(round(steps * config.decay_share), 1)
        after = optax.linear_schedule(peak, final, decay, transition_begin=max(rest - decay, 0))
    else:
        after = optax.constant_schedule(peak)
    if warmup == 0:
        return _promoting(after)
    ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return _promoting(optax.join_schedules([ramp, after], [warmup]))


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip, Adam, decoupled weight decay on matrices, schedule."""
    parts = [
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=_matrices),
        optax.scale_by_learning_rate(make_schedule(config, steps)),
    ]
    if config.clip_norm:
        parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
    chain = optax.chain(*parts)
    return optax.GradientTransformation(chain.init, _promoting(chain.update))


def _promoting(f: Callable[..., Any]) -> Callable[..., Any]:
    """optax mixes integer step counts with floats, which strict dtype promotion refuses."""

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return f(*args, **kwargs)

    return wrapped


def zero_rows(opt_state: Any, dead: dict[str, jax.Array]) -> Any:
    """Sets to zero the moments of some rows: `dead` maps a parameter's path to (F,) bool.

    Only leaves shaped like the parameter are touched, and of those only the rows marked True.
    """

    def reset(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = path_string(path)
        for param, rows in dead.items():
            if name.endswith("/" + param) and leaf.ndim == 2:
                return jnp.where(rows[:, None], jnp.zeros_like(leaf), leaf)
        return leaf

    return jax.tree_util.tree_map_with_path(reset, opt_state)


def _matrices(params: Any) -> Any:
    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        kind = path_string(path).rsplit("/", 1)[-1]
        return not (kind == "scale" or kind.endswith(("bias", "_norm")))

    return jax.tree_util.tree_map_with_path(decays, params)
