"""Which neurons fire, how often and where: statistics of ReLU layers over a dataset.

Everything follows from three counts per layer, which add up exactly over batches: tokens by number
of active neurons (so that mean, quantiles and maximum are exact), tokens on which each neuron
fires, and active neurons by position.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.gated_ffn import reference
from sparsejax.analysis.steps import Stream, Walk, add, on_mesh, read_batches
from sparsejax.checks import host_batches, model_config, scalar
from sparsejax.config import ModelConfig
from sparsejax.modules import RMSNorm
from sparsejax.sharding import BATCH_AXES, constrain, gather_fsdp
from sparsejax.types import Params

_NAME = "activation_stats"
RARE = 1e-3
"""A neuron that fires on a smaller share of the tokens is rare; a dead one is rare too."""


@dataclasses.dataclass(frozen=True, eq=False)
class LayerActivations:
    """Counts of one layer, and what follows from them.

    Attributes:
      layer: its index.
      histogram: (F + 1,) int64, tokens with n active neurons.
      fired: (F,) int64, tokens on which each neuron is active.
      position_sum: (T,) int64, active neurons summed over the tokens at each position.
      position_tokens: (T,) int64, tokens at each position.
    """

    layer: int
    histogram: np.ndarray
    fired: np.ndarray
    position_sum: np.ndarray
    position_tokens: np.ndarray

    @property
    def d_ff(self) -> int:
        """Neurons F."""
        return len(self.fired)

    @property
    def tokens(self) -> int:
        """Tokens counted."""
        return int(self.histogram.sum())

    @property
    def mean(self) -> float:
        """Mean of active neurons per token."""
        return float(self.fired.sum() / self.tokens)

    @property
    def maximum(self) -> int:
        """Most active neurons on one token."""
        return int(np.flatnonzero(self.histogram)[-1])

    def quantile(self, q: float) -> int:
        """The least n such that a share q of the tokens has at most n active neurons."""
        if not 0 <= q <= 1:
            raise ValueError(f"quantile: q must be in [0, 1], got {q}")
        # Compared as counts: q * tokens may lie a rounding above the count it means.
        needed = max(1, math.ceil(round(q * self.tokens, 6)))
        return int(np.searchsorted(np.cumsum(self.histogram), needed))

    @property
    def dead(self) -> np.ndarray:
        """Indices of the neurons that never fire."""
        return np.flatnonzero(self.fired == 0)

    @property
    def rare(self) -> np.ndarray:
        """Indices of the neurons that fire on less than 0.1 % of the tokens, dead ones included."""
        return np.flatnonzero(self.fired < RARE * self.tokens)

    def hottest(self, share: float) -> float:
        """Share of all activations that falls on the most active `share` of the neurons."""
        count = math.ceil(round(share * self.d_ff, 6))
        return float(np.sort(self.fired)[::-1][:count].sum() / max(self.fired.sum(), 1))

    @property
    def by_position(self) -> np.ndarray:
        """(T,) mean of active neurons at each position; NaN where no token stands."""
        with np.errstate(invalid="ignore"):
            return self.position_sum / self.position_tokens

    def summary(self) -> dict[str, Any]:
        """One row of a table."""
        return {
            "layer": self.layer,
            "d_ff": self.d_ff,
            "mean": self.mean,
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "max": self.maximum,
            "dead": len(self.dead),
            "rare": len(self.rare),
            "hottest_1_percent": self.hottest(0.01),
            "hottest_5_percent": self.hottest(0.05),
            "first_position": float(self.by_position[0]),
        }


@dataclasses.dataclass(frozen=True, eq=False)
class ActivationStats:
    """Result of `activation_stats`.

    Attributes:
      layers: one entry per layer measured, in order.
      tokens: tokens counted.
    """

    layers: tuple[LayerActivations, ...]
    tokens: int

    def of_layer(self, layer: int) -> LayerActivations:
        """The entry of one layer.

        Raises:
          ValueError: it was not measured.
        """
        for found in self.layers:
            if found.layer == layer:
                return found
        known = [found.layer for found in self.layers]
        raise ValueError(f"activation statistics cover layers {known}, not layer {layer}")

    def summary(self) -> list[dict[str, Any]]:
        """One row per layer, as in `to_csv`."""
        return [layer.summary() for layer in self.layers]

    def to_json(self, path: str | Path | None = None) -> str:
        """The counts and the summary as JSON text, also written to `path` if given."""
        layers = [
            layer.summary()
            | {
                "fired": layer.fired.tolist(),
                "histogram": np.trim_zeros(layer.histogram, "b").tolist(),
                "position_sum": layer.position_sum.tolist(),
                "position_tokens": layer.position_tokens.tolist(),
            }
            for layer in self.layers
        ]
        # A position 0 without tokens (NaN) is no JSON number.
        text = json.dumps({"tokens": self.tokens, "layers": _without_nan(layers)})
        if path is not None:
            Path(path).write_text(text)
        return text

    @classmethod
    def from_json(cls, text: str) -> ActivationStats:
        """The inverse of `to_json`."""
        data = json.loads(text)
        layers = []
        for entry in data["layers"]:
            histogram = np.zeros(entry["d_ff"] + 1, np.int64)
            histogram[: len(entry["histogram"])] = entry["histogram"]
            counts = (entry[k] for k in ("fired", "position_sum", "position_tokens"))
            arrays = [np.asarray(c, np.int64) for c in counts]
            layers.append(LayerActivations(entry["layer"], histogram, *arrays))
        return cls(tuple(layers), data["tokens"])

    def to_csv(self, path: str | Path) -> None:
        """Writes the summary, one row per layer."""
        rows = self.summary()
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else ["layer"])
            writer.writeheader()
            writer.writerows(rows)


def activation_stats(
    config: ModelConfig,
    params: Params,
    batches: Iterable[Any],
    layers: int | Sequence[int] | None = None,
) -> ActivationStats:
    """How many and which neurons are active, n active on a token where its pre-activation is > 0.

    The model is walked layer by layer and batch by batch; memory holds one residual stream and one
    layer's pre-activations. Counts are exact integers. Parameters may lie on a mesh.

    Args:
      config: the model.
      params: its parameters.
      batches: token arrays (B, T), or dicts as a data loader gives them: "tokens" and, where
        present, "positions" (which are then the positions counted by), "segment_ids" and
        "loss_mask" (tokens that are False are left out).
      layers: the ReLU layers to measure; None for all.

    Returns:
      ActivationStats.

    Raises:
      ValueError: no tokens in `batches`, batches that are none, a layer without ReLU neurons,
        parameters that do not fit, or pre-activations that are not finite.
    """
    model_config(_NAME, config)
    given: Any = config.sparse_layers if layers is None else scalar(layers)
    wanted = [scalar(i) for i in given] if isinstance(given, Iterable) else [given]
    chosen = tuple(sorted(set(wanted)))
    wrong = [i for i in chosen if i not in config.sparse_layers]
    if wrong:
        raise ValueError(
            f"{_NAME}: layers names layer {wrong[0]}, which has no ReLU neurons; those that have "
            f"are {list(config.sparse_layers)}"
        )
    walk = Walk(config, params)
    totals: dict[int, dict[str, np.ndarray]] = {i: {} for i in chosen}
    tokens = 0
    with on_mesh(params):
        for batch in read_batches(_NAME, host_batches(_NAME, batches)):
            counts = {}
            stream = walk.embed(batch)
            for i in range(chosen[-1] + 1 if chosen else 0):
                read = walk.read(i, stream)
                attention = walk.part("attention", i, read, batch)
                x = add(read, attention)
                if i in totals:
                    counts[i] = _counts(walk, i, x, batch)
                if i < chosen[-1]:
                    delta = add(attention, walk.part("ffn", i, x, batch))
                    stream = Stream(add(stream.x, delta), read)
            # Fetched at once: one batch in flight.
            for i, found in jax.device_get(counts).items():
                if found.pop("not_finite"):
                    raise ValueError(
                        f"{_NAME}: pre-activations of layer {i} are not finite: ids outside the "
                        "vocabulary, parameters that are not finite, or an overflow"
                    )
                totals[i] = {k: _add(totals[i].get(k), v) for k, v in found.items()}
            tokens += batch.count
    for found in totals.values():
        used = int(np.flatnonzero(found["position_tokens"])[-1]) + 1
        found |= {k: found[k][:used] for k in ("position_sum", "position_tokens")}
    return ActivationStats(tuple(LayerActivations(i, **totals[i]) for i in chosen), tokens)


def _counts(walk: Walk, i: int, x: Array, batch: Any) -> dict[str, Array]:
    layer, params = walk.layer(i)
    assert layer.ffn is not None
    ffn = params["ffn"]
    rows = ffn["gate" if layer.ffn.gated else "up"]
    core = walk.config.replace(layers=())
    norm, bias = params["ffn_norm"], ffn.get("gate_bias")
    # A multiple of the rows' length, so that few programs are compiled.
    length = x.shape[1]
    size = length * (int(jnp.max(batch.positions)) // length + 1)
    return _count(core, size, norm, rows, bias, x, batch.positions, batch.mask)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _count(
    core: ModelConfig,
    size: int,
    norm: Params,
    rows: Array,
    bias: Array | None,
    x: Array,
    positions: Array,
    mask: Array,
) -> dict[str, Array]:
    """The counts of one layer on one batch, replicated, from the input x (B, T, D) of its norm."""
    module: Any = RMSNorm(core)
    normed = module.apply({"params": norm}, x)
    rows = gather_fsdp(rows.astype(core.dtype), "ffn/gate")
    pre = jnp.einsum("btd,fd->btf", normed, rows)
    if bias is not None:
        pre = pre + bias.astype(core.dtype)
    active = constrain(reference.is_active(pre) & mask[..., None], BATCH_AXES, None, "tensor")
    nnz = jnp.sum(active, axis=-1, dtype=jnp.int32)
    ones = mask.astype(jnp.int32)
    none = jnp.zeros((size,), jnp.int32)
    counts = {
        "histogram": jnp.zeros((rows.shape[0] + 1,), jnp.int32).at[nnz].add(ones),
        "fired": jnp.sum(active, axis=(0, 1), dtype=jnp.int32),
        "position_sum": none.at[positions].add(nnz),
        "position_tokens": none.at[positions].add(ones),
        "not_finite": jnp.sum(~jnp.isfinite(pre) & mask[..., None], dtype=jnp.int32),
    }
    return {k: constrain(v, *[None] * v.ndim) for k, v in counts.items()}


def _add(total: np.ndarray | None, counts: np.ndarray) -> np.ndarray:
    """Sum in int64; batches may differ in length."""
    counts = counts.astype(np.int64)
    if total is None:
        return counts
    size = max(len(total), len(counts))
    return np.pad(total, (0, size - len(total))) + np.pad(counts, (0, size - len(counts)))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value
