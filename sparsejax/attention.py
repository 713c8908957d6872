"""Causal grouped-query attention and its key/value cache, as pure functions."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from sparsejax.config import ModelConfig
from sparsejax.types import Keys, Queries

Cache = dict[str, "LayerCache"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer; slot s of row b holds the token at position s of row b.

    Attributes:
      keys: (B, S, G, K).
      values: (B, S, G, K).
    """

    keys: Array
    values: Array


def init_cache(config: ModelConfig, batch: int, slots: int, dtype=None) -> Cache:
    """Empty caches (B, S, G, K), only for the layers that have attention: {"layer_{i}": ...}."""
    dtype = jnp.dtype(config.dtype) if dtype is None else dtype
    cache = {}
    for i in config.attention_layers:
        a = config.layers[i].attention
        assert a is not None
        zeros = jnp.zeros((batch, slots, a.num_kv_heads, a.head_dim), dtype)
        cache[f"layer_{i}"] = LayerCache(keys=zeros, values=zeros)
    return cache


def causal_attention(q: Queries, k: Keys, v: Keys, segment_ids: Array | None) -> Queries:
    """softmax(q k^T / sqrt(K)) v over positions at or before each query, within its document.

    Args:
      q: (B, T, H, K) queries.
      k: (B, T, G, K) keys; H is a multiple of G.
      v: (B, T, G, K) values.
      segment_ids: (B, T) document of each token, or None for one document per row.

    Returns:
      (B, T, H, K), dtype of q. Runs cuDNN's flash attention on a GPU in half precision.
    """
    mask = None
    if segment_ids is not None:
        mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, implementation=_engine(q.dtype)
    )


def cached_attention(
    q: Queries, k: Keys, v: Keys, positions: Array, cache: LayerCache
) -> tuple[Queries, LayerCache]:
    """Writes k and v into slots `positions` (B, T), then attends to slots at or before each query.

    Rows may be at different positions. Positions must be below the cache's S slots: the caller
    checks this on the host, where positions are known.
    """
    write = jax.vmap(lambda buffer, rows, at: buffer.at[at].set(rows.astype(buffer.dtype)))
    cache = LayerCache(
        keys=write(cache.keys, k, positions), values=write(cache.values, v, positions)
    )
    slots = jnp.arange(cache.keys.shape[1], dtype=positions.dtype)
    mask = (slots <= positions[:, :, None])[:, None]
    out = jax.nn.dot_product_attention(
        q, cache.keys.astype(q.dtype), cache.values.astype(q.dtype), mask=mask
    )
    return out, cache


def _engine(dtype) -> Literal["cudnn"] | None:
    # cuDNN's flash attention takes half precision only; float32 keeps XLA's exact path.
    half = dtype in (jnp.bfloat16, jnp.float16)
    return "cudnn" if half and jax.default_backend() == "gpu" else None
