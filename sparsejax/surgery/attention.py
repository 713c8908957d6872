"""Attention removed, or left with fewer key/value heads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sparsejax.checks import whole_number
from sparsejax.config import AttentionConfig, ModelConfig
from sparsejax.surgery import leaves
from sparsejax.surgery.common import (
    Layers,
    layer_indices,
    put_together,
    take_apart,
)
from sparsejax.types import Params


def remove_attention(
    config: ModelConfig, params: Params, layers: Layers
) -> tuple[ModelConfig, Params]:
    """y = x + FFN(norm(x)) for the given layers: their attention and its norm are dropped.

    No layer changes its number: one that has no feed-forward part either stays in its place, holds
    no parameters and does nothing.

    Args:
      config: the model.
      params: its parameters.
      layers: one index or several, each of a layer that has attention.

    Returns:
      (config, params).

    Raises:
      ValueError: an unknown layer, one without attention, or one given twice.
    """
    name = "remove_attention"
    chosen = layer_indices(name, config, layers)
    for i in chosen:
        _attention_of(name, config, i)
    parts = take_apart(config, params)
    for i in chosen:
        layer, part = parts[i]
        del part["attn"], part["attn_norm"]
        parts[i] = dataclasses.replace(layer, attention=None), part
    return put_together(config, params, parts)


def reduce_kv_heads(
    config: ModelConfig,
    params: Params,
    layers: Layers,
    num_kv_heads: int,
    *,
    donate: bool = False,
) -> tuple[ModelConfig, Params]:
    """k'_g = mean of the G / G' consecutive heads g G/G', ..., and v' alike; biases too.

    k and v go from (D, G, K) to (D, G', K), `k_bias` and `v_bias` from (G, K) to (G', K). Query
    heads stay: those that read one of the pooled heads now read their mean. Exact only where these
    heads were equal; the starting point for training otherwise. Means are taken in float32.

    Args:
      config: the model.
      params: its parameters.
      layers: one index or several, each of a layer that has attention.
      num_kv_heads: G', a divisor of G.
      donate: free each old leaf as soon as its successor exists. The old tree is unusable then.

    Returns:
      (config, params).

    Raises:
      ValueError: an unknown layer or one without attention, a number that does not divide G, or
        one that the mesh axis that splits the heads does not divide.

    Source: GQA, arXiv 2305.13245 (mean pooling); Puzzle, arXiv 2411.19146.
    """
    name = "reduce_kv_heads"
    new = whole_number(name, "num_kv_heads", num_kv_heads)
    chosen = layer_indices(name, config, layers)
    parts = take_apart(config, params)
    for i in chosen:
        old = _attention_of(name, config, i).num_kv_heads
        if old % new:
            divisors = [n for n in range(1, old + 1) if old % n == 0]
            raise ValueError(
                f"{name}: num_kv_heads must divide layer {i}'s {old}, got {new}; use one of "
                f"{divisors}"
            )
        for leaf, dim in _KV_LEAVES.items():
            if leaf in parts[i][1]["attn"]:
                path = f"layer_{i}/attn/{leaf}"
                argument = f"num_kv_heads = {new}"
                leaves.check_divides(name, argument, parts[i][1]["attn"][leaf], path, dim, new)
    donated = leaves.Donated(name, params, donate)
    for i in chosen:
        layer, part = parts[i]
        attention = _attention_of(name, config, i)
        if attention.num_kv_heads == new:
            continue
        part["attn"] = dict(part["attn"])
        for leaf, dim in _KV_LEAVES.items():
            if leaf in part["attn"]:
                old = part["attn"][leaf]
                path = f"layer_{i}/attn/{leaf}"
                pooled = leaves.run(_pool, [old], static=(dim, new), path=path, rows=False)
                part["attn"][leaf] = pooled
                donated.free([old], made=pooled)
        attention = dataclasses.replace(attention, num_kv_heads=new)
        parts[i] = dataclasses.replace(layer, attention=attention), part
    return put_together(config, params, parts)


# Which dimension of each leaf counts key/value heads.
_KV_LEAVES = {"k": 1, "v": 1, "k_bias": 0, "v_bias": 0}


def _pool(sources: tuple[jax.Array], operands: tuple[()], *, static: tuple[int, int]) -> jax.Array:
    (x,), (dim, heads) = sources, static
    shape = (*x.shape[:dim], heads, x.shape[dim] // heads, *x.shape[dim + 1 :])
    return jnp.mean(x.astype(jnp.float32).reshape(shape), axis=dim + 1).astype(x.dtype)


def _attention_of(function: str, config: ModelConfig, layer: int) -> AttentionConfig:
    attention = config.layers[layer].attention
    if attention is None:
        raise ValueError(
            f"{function}: layer {layer} has no attention; layers with attention: "
            f"{list(config.attention_layers)}"
        )
    return attention
