"""Sums over the tokens of a batch of how two (B, T, D) arrays lie to each other, in float32.

Vectors are divided by their largest entry before they are squared, so that none is too small or
too large for float32. A token on which one of the vectors is zero has no angle: it is counted, and
left out of the sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


@jax.jit
def cosine_distance(a: Array, b: Array, mask: Array) -> tuple[Array, Array, Array]:
    """Sum over tokens of 1 - <a, b> / (|a| |b|), tokens without an angle, tokens not finite.

    Taken as half the squared distance of the unit vectors, which is the same number and keeps its
    digits where the vectors are nearly parallel.
    """
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(a) & jnp.isfinite(b), axis=-1)
    unit_a, length_a = _unit(a)
    unit_b, length_b = _unit(b)
    zero = (length_a == 0) | (length_b == 0)
    distance = 0.5 * jnp.sum(jnp.square(unit_a - unit_b), axis=-1)
    total = jnp.sum(jnp.where(mask & finite & ~zero, distance, 0.0))
    return total, _count(mask & finite & zero), _count(mask & ~finite)


@jax.jit
def input_output(x: Array, delta: Array, mask: Array) -> tuple[Array, Array, Array, Array]:
    """Sums of cos(x, x + delta) and |delta| / |x|, tokens where one has none, tokens not finite."""
    x, delta = x.astype(jnp.float32), delta.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(x) & jnp.isfinite(delta), axis=-1)
    unit_x, length_x = _unit(x)
    unit_y, length_y = _unit(x + delta)
    _, length_delta = _unit(delta)
    zero = (length_x == 0) | (length_y == 0)
    use = mask & finite & ~zero
    cosine = 1.0 - 0.5 * jnp.sum(jnp.square(unit_x - unit_y), axis=-1)
    ratio = length_delta / jnp.where(length_x == 0, 1.0, length_x)
    return (
        jnp.sum(jnp.where(use, cosine, 0.0)),
        jnp.sum(jnp.where(use, ratio, 0.0)),
        _count(mask & finite & zero),
        _count(mask & ~finite),
    )


@jax.jit
def not_finite(x: Array, mask: Array) -> Array:
    """Tokens on which x (B, T, D) is not finite."""
    return _count(mask & ~jnp.all(jnp.isfinite(x), axis=-1))


def _count(tokens: Array) -> Array:
    return jnp.sum(tokens, dtype=jnp.int32)


def _unit(x: Array) -> tuple[Array, Array]:
    peak = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scaled = x / jnp.where(peak == 0, 1.0, peak)
    length = jnp.sqrt(jnp.sum(jnp.square(scaled), axis=-1, keepdims=True))
    return scaled / jnp.where(length == 0, 1.0, length), (length * peak)[..., 0]
