"""Dense or sparse, and which rows are long: decided on the device from the call's own counts.

The costs are times on one H200 (notes_ffn.md), scaled by shape. Every choice is exact; only time
depends on these numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels import _triton as tl
from pallas_kernels.gated_ffn.config import FFNConfig

_SAMPLE = 256  # rows


class Costs(NamedTuple):
    """Nanoseconds on a full chip.

    Attributes:
      entry: one active neuron of one token, everything that follows the gate projection.
      row: one token that is walked, before its entries.
      dense_row: the same work for one token in the dense engine.
      fixed: what the sparse path costs whatever its size.
    """

    entry: float
    row: float
    dense_row: float
    fixed: float


def costs(width: int, features: int, *, training: bool) -> Costs:
    """Forward alone: two dense matmuls of a token 64 ns, a walked entry 0.88, lists and row 9.

    With the backward pass: six more dense matmuls 204 ns, three more passes over the entries 2.2.
    All at D = 2048, F = 5632, bf16.
    """
    wide, tall = width / 2048, features / 5632
    forward = Costs(0.88 * wide, 4.5 * wide + 4.5 * tall, 64 * wide * tall, 25e3)
    if not training:
        return forward
    backward = Costs(2.2 * wide, 8 * wide + 2 * tall, 204 * wide * tall, 80e3)
    return Costs(*(a + b for a, b in zip(forward, backward, strict=True)))


def sample_nnz(pre: Array) -> Array:
    """Active neurons of up to some 256 rows spread over the call."""
    tokens = pre.shape[0]
    stride = max(1, tokens // _SAMPLE) | 1  # odd: sequences start at even rows, with long lists
    sample = pre[min(7, tokens - 1) % stride :: stride]
    return jnp.sum(tl.is_active(sample), axis=1, dtype=jnp.int32)


def sparse_pays(nnz: Array, tokens: int, width: int, features: int, *, training: bool) -> Array:
    """() bool: the sparse path is expected to be the faster one, from a sample of counts."""
    cost = costs(width, features, training=training)
    # A row that is not worth walking goes to the tail, at somewhat more than the dense price.
    rows = jnp.minimum(nnz.astype(jnp.float32) * cost.entry, 1.2 * cost.dense_row)
    sparse = jnp.sum(rows) * (tokens / nnz.shape[0]) + (cost.row * tokens + cost.fixed)
    return sparse < cost.dense_row * tokens


def walk_limit(
    nnz: Array, tokens: int, width: int, features: int, config: FFNConfig, *, all_rows: bool
) -> Array:
    """(1,) int32: rows with more active neurons than this go to the tail; -1 for all rows.

    In units of one walked entry, a tail row costs F / 77 of them; a tail that is not empty takes
    0.65 us per 64 of its two depths D and F before its size matters; listing and starting a walked
    row costs 0.11 of a tail row.

    Args:
      nnz: a sample of counts.
      tokens, width, features: M, D, F.
      config: `walk_limit` and `list_width` are read.
      all_rows: whether -1 may be the answer.
    """
    if config.walk_limit is not None:
        return jnp.full((1,), min(config.walk_limit, config.list_width), jnp.int32)
    even = max(1, features // 77)
    scale = tokens / nnz.shape[0]
    entry_ns = 0.88 * width / 2048
    tail_entries = 650 * (width + features) / 64 / entry_ns
    saved = jnp.sum(jnp.maximum(nnz - even, 0))
    low = min(even, config.list_width)
    limit = jnp.where(saved > int(tail_entries / scale), jnp.int32(low), config.list_width)
    if all_rows:
        spared = jnp.sum(jnp.maximum(even - nnz, 0))
        limit = jnp.where(spared < int(0.11 * even * nnz.shape[0]), jnp.int32(-1), limit)
    return limit.reshape(1)
