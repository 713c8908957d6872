"""How much each layer's contribution depends on each layer before it."""

from __future__ import annotations

import csv
import dataclasses
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax import Array

from sparsejax.analysis.steps import Batch, Stream, Walk, add, on_mesh, read_batches
from sparsejax.analysis.tokenwise import cosine_distance, not_finite
from sparsejax.checks import host_batches
from sparsejax.config import ModelConfig
from sparsejax.types import Params

What = Literal["block", "attention", "ffn"]
_NAME = "block_dependency"


@dataclasses.dataclass(frozen=True, eq=False)
class Dependency:
    """Result of `block_dependency`.

    Attributes:
      matrix: (m, m) float64; [i, j] says how far j's contribution turns when i is removed, from 0
        (j does not depend on i) to 2. NaN where j <= i, where a layer has no such part, and where
        no token has an angle.
      left_out: (m, m) int64, tokens left out of the mean of [i, j] because one of the two
        contributions is zero there.
      tokens: tokens seen.
      part: what was removed and measured: "block", "attention" or "ffn".
      forwards: parts of layers applied over parts of the model, mean of the batches: the cost in
        full forward passes.
    """

    matrix: np.ndarray
    left_out: np.ndarray
    tokens: int
    part: What
    forwards: float

    def to_csv(self, path: str | Path) -> None:
        """Writes one row per pair: removed, measured, distance, tokens, left_out."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["part", "removed", "measured", "distance", "tokens", "left_out"])
            for i, j in zip(*np.triu_indices(len(self.matrix), 1), strict=True):
                value = repr(float(self.matrix[i, j]))
                rows.writerow([self.part, i, j, value, self.tokens, self.left_out[i, j]])

    def save(self, path: str | Path) -> None:
        """Writes everything to an .npz file, for `Dependency.load`."""
        with Path(path).open("wb") as file:
            np.savez(file, **dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> Dependency:
        """What `save` wrote."""
        with np.load(path) as file:
            return cls(
                matrix=file["matrix"],
                left_out=file["left_out"],
                tokens=int(file["tokens"]),
                part=str(file["part"]),  # pyright: ignore[reportArgumentType]
                forwards=float(file["forwards"]),
            )


def block_dependency(
    config: ModelConfig, params: Params, batches: Iterable[Any], *, part: What = "block"
) -> Dependency:
    """M[i, j] = mean over tokens of 1 - cos(h_j, h_j without i), for layers i < j.

    h_j is what layer j adds to the residual stream; "without i" means that layer i adds nothing and
    everything after it is computed anew. With part="attention" or "ffn" only that part of layer i
    is removed and only that part's contribution of layer j is measured; the rest of both stays.

    All m passes with one layer removed go through the model together, layer by layer, and a pass
    begins where its layer is removed. So a batch costs (m + 1) / 2 forward passes instead of m + 1
    (m / 2 + 1 at most for single parts), and memory holds one residual stream (B, T, D) per layer.
    Programs are compiled per kind of part, not per layer removed. Parameters may lie on a mesh; no
    more than one part of one layer is ever gathered (over fsdp). Distances are float32 per token
    and batch, float64 over batches.

    Args:
      config: the model.
      params: its parameters.
      batches: token arrays (B, T), or dicts as a data loader gives them: "tokens" and, where
        present, "positions", "segment_ids" and "loss_mask" (positions that are False are left out).
      part: "block", "attention" or "ffn".

    Returns:
      Dependency.

    Raises:
      ValueError: no tokens in `batches`, batches that are none, an unknown `part`, parameters that
        do not fit, or a contribution that is NaN or infinite.

    Warns:
      UserWarning: tokens were left out because a contribution is zero on them (`left_out`).

    Source: block-wise dependency of FFN Fusion, arXiv 2503.18908, which does not say how tokens are
    reduced; the mean over tokens is this project's choice.
    """
    if part not in ("block", "attention", "ffn"):
        raise ValueError(f"{_NAME}: part must be 'block', 'attention' or 'ffn', got {part!r}")
    walk = Walk(config, params)
    m = config.num_layers
    total, left_out, tokens, seen = np.zeros((m, m)), np.zeros((m, m), np.int64), 0, 0
    measured: set[tuple[int, int]] = set()
    with on_mesh(params):
        for batch in read_batches(_NAME, host_batches(_NAME, batches)):
            # Fetched at once: one batch in flight.
            embedded, contributions, pairs = jax.device_get(_rows(walk, batch, part))
            _check_finite(embedded, contributions, pairs, batch.count)
            for (i, j), (distance, zero, _) in pairs.items():
                total[i, j] += distance
                left_out[i, j] += zero
                measured.add((i, j))
            tokens, seen = tokens + batch.count, seen + 1
    matrix = np.full((m, m), np.nan)
    for i, j in measured:
        used = tokens - left_out[i, j]
        if used:
            matrix[i, j] = total[i, j] / used
    if left_out.any():
        i, j = np.unravel_index(np.argmax(left_out), left_out.shape)
        warnings.warn(
            f"{_NAME}: contributions that are zero have no direction; such tokens are left out, "
            f"most of layer {j} with layer {i} removed: {left_out[i, j]} of {tokens} (see "
            "left_out)",
            stacklevel=2,
        )
    return Dependency(matrix, left_out, tokens, part, walk.forwards() / seen)


def _rows(
    walk: Walk, batch: Batch, part: What
) -> tuple[Array, dict[int, Array], dict[tuple[int, int], tuple[Array, Array, Array]]]:
    """One batch: tokens not finite per contribution, and `cosine_distance` per pair (i, j)."""
    layers = walk.config.layers
    measured = [
        j
        for j, layer in enumerate(layers)
        if (part != "ffn" and layer.attention) or (part != "attention" and layer.ffn)
    ]
    full = walk.embed(batch)
    # Masked positions count too: attention multiplies their NaN by zero, which is NaN.
    embedded = not_finite(full.x, np.ones_like(batch.mask))
    contributions: dict[int, Array] = {}
    pairs: dict[tuple[int, int], tuple[Array, Array, Array]] = {}
    without: dict[int, Stream] = {}
    for j in range(measured[-1] + 1 if measured else 0):
        last = j == measured[-1]

        def advance(stream: Stream, j: int = j, last: bool = last):
            """What layer j adds of `part`, and the stream after it (not needed after the last)."""
            read = walk.read(j, stream)
            attention = walk.part("attention", j, read, batch)
            if last and part == "attention":
                return attention, attention, stream
            ffn = walk.part("ffn", j, add(read, attention), batch)
            both = add(attention, ffn)
            own = {"block": both, "attention": attention, "ffn": ffn}[part]
            return own, attention, walk.after(j, add(stream.x, both), read)

        own, attention, after = advance(full)
        for i, stream in without.items():
            changed, _, without[i] = advance(stream)
            if own is not None:
                pairs[i, j] = cosine_distance(own, changed, batch.mask)
        if own is not None:
            contributions[j] = not_finite(own, batch.mask)
            if not last:
                read = walk.read(j, full)
                kept = {
                    "block": lambda: None,
                    "attention": lambda read=read, j=j: walk.part("ffn", j, read, batch),
                    "ffn": lambda attention=attention: attention,
                }[part]()
                without[j] = walk.after(j, add(full.x, kept), read)
        full = after
    return embedded, contributions, pairs


def _check_finite(
    embedded: np.ndarray,
    contributions: dict[int, np.ndarray],
    pairs: dict[tuple[int, int], tuple[np.ndarray, ...]],
    tokens: int,
) -> None:
    if embedded:
        raise ValueError(
            f"{_NAME}: embeddings of {embedded} tokens are not finite: ids outside the vocabulary "
            "(masked positions need valid ones too), or parameters that are not finite"
        )
    for j, count in contributions.items():
        if count:
            raise ValueError(
                f"{_NAME}: the contribution of layer {j} is not finite on {count} of {tokens} "
                "tokens; its parameters, or an earlier layer's, are not finite, or overflow in the "
                "model's dtype"
            )
    for (i, j), (_, _, count) in pairs.items():
        if count:
            raise ValueError(
                f"{_NAME}: the contribution of layer {j} with layer {i} removed is not finite on "
                f"{count} of {tokens} tokens; it overflows: compute in a wider dtype, "
                "config.replace(dtype='float32')"
            )
