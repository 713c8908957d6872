"""Causal grouped-query attention and its key/value cache, as pure functions."""

from __future__ import annotations

import dataclasses
import functools

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

    Heads come before slots, so that a decode step multiplies the cache as it lies: with slots first
    XLA transposes a copy of the whole cache at every step.

    Attributes:
      keys: (B, G, S, K).
      values: (B, G, S, K).
    """

    keys: Array
    values: Array


def init_cache(config: ModelConfig, batch: int, slots: int, dtype=None) -> Cache:
    """Empty caches (B, G, S, K), only for the layers that have attention: {"layer_{i}": ...}."""
    dtype = jnp.dtype(config.dtype) if dtype is None else dtype
    cache = {}
    for i in config.attention_layers:
        a = config.layers[i].attention
        assert a is not None
        zeros = jnp.zeros((batch, a.num_kv_heads, slots, a.head_dim), dtype)
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
      (B, T, H, K), dtype of q. Runs cuDNN's flash attention on a GPU in half precision (heads a
      multiple of 8 up to 128 wide; with documents, an even T), else XLA's dense form in float32.
    """
    mask = None
    if segment_ids is not None:
        mask = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    attend = functools.partial(jax.nn.dot_product_attention, mask=mask, is_causal=True)
    if _cudnn(q, masked=mask is not None):
        return attend(q, k, v, implementation="cudnn")
    # In float32 throughout: the backward pass of jax's half-precision form mixes dtypes, which
    # strict promotion refuses.
    q32, k32, v32 = (a.astype(jnp.float32) for a in (q, k, v))
    return attend(q32, k32, v32, implementation="xla").astype(q.dtype)


def token_positions(positions: Array | None, batch: int, length: int) -> Array:
    """`positions` (B, T) as given; for None 0..T-1 in every row."""
    if positions is None:
        return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    return positions


def write_cache(k: Keys, v: Keys, positions: Array | None, cache: LayerCache) -> LayerCache:
    """The cache with k and v (B, T, G, K) in slots `positions` (B, T); None means 0..T-1.

    Rows may be at different positions. Positions must lie in [0, S): a key written beyond the last
    slot is lost without a sign, so the caller checks on the host, where positions are known.

    Raises:
      ValueError: positions is None and the cache is not (B, G, T or more, K).
    """

    def write_row(buffer: Array, rows: Array, at: Array) -> Array:
        return buffer.at[:, at].set(rows.swapaxes(0, 1).astype(buffer.dtype))

    def write(buffer: Array, rows: Array) -> Array:
        if positions is not None:
            return jax.vmap(write_row)(buffer, rows, positions)
        b, t, g, width = rows.shape
        if buffer.shape != (b, g, max(t, buffer.shape[2]), width):
            raise ValueError(
                f"cache: {t} tokens from position 0 on need (B, G, S, K) = ({b}, {g}, {t} or more, "
                f"{width}), got {buffer.shape}; make it with init_cache(config, {b}, {t})"
            )
        # A plain copy, and nothing of the old buffer where T = S. A scatter, of 8 x 2048
        # tokens, took 0.255 ms on an H200, of which its bytes explain 0.03.
        rows = rows.swapaxes(1, 2).astype(buffer.dtype)
        return jax.lax.dynamic_update_slice(buffer, rows, (0, 0, 0, 0))

    return LayerCache(keys=write(cache.keys, k), values=write(cache.values, v))


def cached_attention(
    q: Queries, k: Keys, v: Keys, positions: Array | None, cache: LayerCache
) -> tuple[Queries, LayerCache]:
    """`write_cache`, then attends to slots at or before each query.

    A key at a position beyond the last slot is lost, and its query attends without it.
    """
    cache = write_cache(k, v, positions, cache)
    positions = token_positions(positions, *q.shape[:2])
    slots = jnp.arange(cache.keys.shape[2], dtype=positions.dtype)
    mask = (slots <= positions[:, :, None])[:, None]
    keys, values = (x.astype(q.dtype).swapaxes(1, 2) for x in (cache.keys, cache.values))
    with jax.numpy_dtype_promotion("standard"):  # jax's code mixes bfloat16 and float32 here
        return jax.nn.dot_product_attention(q, keys, values, mask=mask), cache


def _cudnn(q: Array, *, masked: bool) -> bool:
    """Whether cuDNN's flash attention can run."""
    _, t, _, k = q.shape
    # Half precision only (float32 keeps XLA's exact path), heads of 8, 16, ... 128, and with a
    # mask an even length, else its backward pass refuses.
    able = q.dtype in (jnp.bfloat16, jnp.float16) and k % 8 == 0 and k <= 128
    able = able and not (masked and t % 2)
    return able and jax.default_backend() == "gpu"
