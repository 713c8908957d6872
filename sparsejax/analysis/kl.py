"""How far one next-token distribution is from another, without logits of a whole batch."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from sparsejax.sharding import BATCH_AXES, constrain

# As in `sparsejax.losses`: logits alive hold about as many numbers as tokens x 2048.
CHUNK = 2048


def kl_divergence(p: Array, q: Array, weight: Array, *, chunk: int = CHUNK) -> Array:
    """KL(softmax(p weight^T) || softmax(q weight^T)) per token: (B, T, D) twice, (V, D) -> (B, T).

    Summed as p (e^d - 1 - d) with d = log q - log p, whose terms are never negative: near-equal
    distributions do not drown in rounding. A few positions of every row go at a time, with the
    whole vocabulary, so that two arrays of about tokens x `chunk` float32 logits are alive.

    Args:
      p: hidden states (B, T, D) of the distribution the mean is taken over.
      q: hidden states of the other.
      weight: the output head (V, D) of both.
      chunk: logits alive at a time, per token of the batch (whole positions, at least one).

    Returns:
      (B, T) float32, nats.

    Raises:
      ValueError: shapes that do not fit, or a `chunk` that is not positive.
    """
    if p.shape != q.shape or p.ndim != 3 or p.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"kl_divergence: p and q must be (B, T, D) and weight (V, D), got {list(p.shape)}, "
            f"{list(q.shape)} and {list(weight.shape)}"
        )
    if chunk < 1:
        raise ValueError(f"kl_divergence: chunk must be positive, got {chunk}")
    rows, length, _ = p.shape
    pieces = min(max(length, 1), math.ceil(weight.shape[0] / chunk))
    size = math.ceil(length / pieces)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, pieces * size - length), (0, 0)))
        return jnp.moveaxis(x.reshape(rows, pieces, size, -1), 1, 0)

    def log_probabilities(hidden: Array) -> Array:
        logits = jnp.einsum("btd,vd->btv", hidden, weight, preferred_element_type=jnp.float32)
        logits = constrain(logits, BATCH_AXES, None, "tensor")
        return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def piece(hidden: tuple[Array, Array]) -> Array:
        log_p, log_q = (log_probabilities(h) for h in hidden)
        d = log_q - log_p
        near = jnp.abs(d) < 1
        small = jnp.where(near, d, 0.0)
        terms = jnp.where(
            near,
            jnp.exp(log_p) * (jnp.expm1(small) - small),
            # e^d could overflow where p is tiny; q = p e^d does not.
            jnp.exp(log_q) - jnp.exp(log_p) * (1 + d),
        )
        return jnp.sum(terms, axis=-1)

    found = jax.lax.map(piece, (split(p), split(q)))
    return jnp.moveaxis(found, 0, 1).reshape(rows, pieces * size)[:, :length]
