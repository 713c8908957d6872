"""Cosine distance of student and teacher on the residual stream between layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from sparsejax.distill.layer_map import LayerMap
from sparsejax.model import ModelOutput

# A vector shorter than this counts as if it had this length: no division by zero.
_SHORTEST = 1e-12


def cosine_distance(x: Array, y: Array) -> Array:
    """1 - <x, y> / (|x| |y|) over the last axis: (..., D) and (..., D) -> (...) float32.

    A zero vector is at distance 1 from everything, and its gradient is finite.
    """
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)

    def inverse_length(v: Array) -> Array:
        return jax.lax.rsqrt(jnp.maximum(jnp.sum(v * v, axis=-1), _SHORTEST**2))

    return 1.0 - jnp.sum(x * y, axis=-1) * inverse_length(x) * inverse_length(y)


def hidden_cosines(
    student: ModelOutput, teacher: ModelOutput, layer_map: LayerMap, weights: Array
) -> Array:
    """(P,) float32: for each pair of layers, sum_t weights_t * cosine distance after them.

    Args:
      student: with `hidden_states`; gradients reach it.
      teacher: with `hidden_states`; gradients do not.
      layer_map: the teacher layer of each student layer, None for layers that are not compared.
      weights: (B, T) float32; a token of weight 0 counts nothing, even where it is NaN.

    Returns:
      One sum per pair, in the order of the student's layers.
    """
    pairs = [(s, t) for s, t in enumerate(layer_map) if t is not None]
    rows = []
    for s, t in pairs:
        fixed = jax.lax.stop_gradient(teacher.hidden_states[t + 1])
        distance = cosine_distance(student.hidden_states[s + 1], fixed)
        rows.append(jnp.sum(jnp.where(weights == 0, 0.0, weights * distance)))
    return jnp.stack(rows) if rows else jnp.zeros((0,), jnp.float32)
