"""How far a model's feed-forward activations are from sparse, and what skipping them would save.

Only exact zeros can be skipped without changing the result, and SiLU or GELU make none: for such a
model the exact sparse path gains nothing as it stands. The report says what *would* be gained if
small activations were zeros, and what that would do to the layer's output.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.gated_ffn.output import ACTIVATIONS
from sparsejax.checks import host_ids
from sparsejax.config import FFNConfig, ModelConfig
from sparsejax.modules import Transformer
from sparsejax.types import Params

_CHUNK_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class LayerSparsity:
    """One feed-forward layer; tuples have one entry per threshold.

    Attributes:
      layer: index in `config.layers`.
      activation: "relu", "silu" or "gelu".
      exact_zero: share of neurons and tokens with h = 0.
      below: share with |h| < threshold.
      error: RMS change of the layer's output, relative to its RMS, if those were zeros.
      flops: FLOPs of the layer without the work on those, as a share of the dense layer's. The
        gate (for a layer without one: up) stays dense, up and down shrink. A lower bound: it
        supposes that the gate alone tells which |h| are small, and that sparse work is as fast per
        FLOP as dense work.
    """

    layer: int
    activation: str
    exact_zero: float
    below: tuple[float, ...]
    error: tuple[float, ...]
    flops: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class SparsityReport:
    """Result of `sparsity_report`; `str()` gives a table.

    Attributes:
      thresholds: bounds on |h|.
      tokens: how many tokens were looked at.
      layers: one entry per layer that has a feed-forward part.
      model_speedup: per threshold, dense over remaining forward FLOPs of the whole model (matmuls
        and head; attention scores are left out): an upper bound on the gain.
      speedup_now: the same counting only exact zeros, which is what the sparse path skips.
    """

    thresholds: tuple[float, ...]
    tokens: int
    layers: tuple[LayerSparsity, ...]
    model_speedup: tuple[float, ...]
    speedup_now: float

    def __str__(self) -> str:
        head = "layer  act    zero   " + "  ".join(
            f"{'|h|<' + format(t, 'g'):>9} {'error':>7} {'FLOPs':>6}" for t in self.thresholds
        )
        lines = [f"{self.tokens} tokens", head]
        for x in self.layers:
            cells = "  ".join(
                f"{b:>9.1%} {e:>7.1%} {f:>6.2f}"
                for b, e, f in zip(x.below, x.error, x.flops, strict=True)
            )
            lines.append(f"{x.layer:>5}  {x.activation:<5} {x.exact_zero:>6.1%}  {cells}")
        gains = ", ".join(
            f"{s:.2f}x at |h|<{t:g}"
            for t, s in zip(self.thresholds, self.model_speedup, strict=True)
        )
        lines.append(
            f"by FLOPs alone the sparse path gains {self.speedup_now:.2f}x on the model as it is; "
            f"at most {gains}, if those activations were zeros, which changes each layer's output "
            "by the error shown"
        )
        return "\n".join(lines)


def sparsity_report(
    config: ModelConfig,
    params: Params,
    tokens: Array | np.ndarray,
    thresholds: Sequence[float] = (1e-3, 1e-2, 1e-1),
) -> SparsityReport:
    """Shares of |h| near zero per layer, h = act(x gate^T + b) * (x up^T), on tokens (B, T).

    Args:
      config: the model.
      params: its parameters.
      tokens: (B, T) ids of real text; random ids excite neurons in another way.
      thresholds: bounds on |h|, which has the scale of this model's weights.

    Returns:
      SparsityReport.

    Raises:
      ValueError: thresholds that are not positive, a model without feed-forward layers, or numbers
        that are not finite (ids outside the vocabulary).
    """
    if not thresholds or min(thresholds) <= 0:
        raise ValueError(f"thresholds must be positive, got {list(thresholds)}")
    if not config.ffn_layers:
        raise ValueError("the model has no feed-forward layer to report on")
    inputs = _ffn_inputs(config, params, jnp.asarray(host_ids(tokens)))
    bounds = tuple(float(t) for t in thresholds)
    layers = []
    for i in config.ffn_layers:
        ffn = config.layers[i].ffn
        assert ffn is not None
        x = inputs[f"layer_{i}"]["ffn_norm"]["__call__"][0].reshape(-1, config.d_model)
        if not bool(jnp.isfinite(x).all()):
            raise ValueError(
                f"what the feed-forward part of layer {i} reads is not finite: ids outside the "
                "vocabulary, or parameters that are not finite"
            )
        layers.append(_layer(i, ffn, params[f"layer_{i}"]["ffn"], x, bounds))
    count = int(np.size(tokens))
    gains = tuple(_speedup(config, [x.flops[k] for x in layers]) for k in range(len(bounds)))
    now = [_flops(x.exact_zero, config.layers[x.layer].ffn) for x in layers]
    return SparsityReport(bounds, count, tuple(layers), gains, _speedup(config, now))


def _ffn_inputs(config: ModelConfig, params: Params, tokens: Array) -> dict[str, Any]:
    run: Any = Transformer(config).apply
    _, state = run(
        {"params": params},
        tokens,
        mutable=["intermediates"],
        capture_intermediates=lambda module, _: module.name == "ffn_norm",
    )
    return state["intermediates"]


def _layer(
    index: int, ffn: FFNConfig, weights: Params, x: Array, thresholds: tuple[float, ...]
) -> LayerSparsity:
    sums = np.zeros((3, len(thresholds) + 1))
    for start in range(0, len(x), _CHUNK_TOKENS):
        chunk = x[start : start + _CHUNK_TOKENS]
        sums += np.asarray(_sums(ffn.activation, thresholds, weights, chunk), np.float64)
    count = len(x) * ffn.d_ff
    # Column 0 is the threshold 0: exact zeros, and the full output as reference.
    below = tuple(float(n / count) for n in sums[0, 1:])
    error = tuple(float(np.sqrt(e / sums[2, 0])) if sums[2, 0] else 0.0 for e in sums[1, 1:])
    flops = tuple(_flops(share, ffn) for share in below)
    return LayerSparsity(index, ffn.activation, float(sums[0, 0] / count), below, error, flops)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums(activation: str, thresholds: tuple[float, ...], weights: Params, x: Array) -> Array:
    """Rows: count of |h| below, squared change of the output, squared output (column 0 only)."""
    w = {name: value.astype(jnp.float32) for name, value in weights.items()}
    x = x.astype(jnp.float32)
    first = x @ w["gate" if "gate" in w else "up"].T
    h = ACTIVATIONS[activation](first + w["gate_bias"] if "gate_bias" in w else first)
    h = h * (x @ w["up"].T) if "gate" in w else h
    zero = jnp.zeros((), jnp.float32)
    rows = [
        jnp.stack([jnp.sum(h == 0, dtype=jnp.float32), 0.0, jnp.sum(jnp.square(h @ w["down"]))])
    ]
    for t in thresholds:
        small = jnp.abs(h) < t
        lost = jnp.where(small, h, 0.0) @ w["down"]
        count = jnp.sum(small, dtype=jnp.float32)
        rows.append(jnp.stack([count, jnp.sum(jnp.square(lost)), zero]))
    return jnp.stack(rows, axis=1)


def _flops(skipped: float, ffn: FFNConfig | None) -> float:
    matrices = 3 if ffn is None or ffn.gated else 2
    return (1 + (matrices - 1) * (1 - skipped)) / matrices


def _speedup(config: ModelConfig, remaining: Sequence[float]) -> float:
    """Dense over remaining matmul parameters, with `remaining` of each feed-forward layer."""
    shares = dict(zip(config.ffn_layers, remaining, strict=True))
    dense = left = float(config.vocab_size * config.d_model)
    for i, layer in enumerate(config.layers):
        if layer.attention is not None:
            a = layer.attention
            size = 2 * config.d_model * a.head_dim * (a.num_heads + a.num_kv_heads)
            dense, left = dense + size, left + size
        if layer.ffn is not None:
            size = config.d_model * layer.ffn.d_ff * (3 if layer.ffn.gated else 2)
            dense, left = dense + size, left + size * shares[i]
    return dense / left
