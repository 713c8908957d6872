"""Cross-entropy over a large vocabulary without ever holding (tokens, V) in float32.

The vocabulary is walked in chunks: the forward pass keeps a running maximum and sum per token, the
backward pass computes each chunk's logits again. Cost: one more head matmul (a third of the head's
training FLOPs); saving: the float32 logits and their gradient, 8 bytes x tokens x V, which at 2B
parameters and 16,384 tokens is 6.4 GB. Chunks are strided (chunk j holds ids j, j + n, ...), so a
vocabulary split over devices stays split: each device walks its own rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from sparsejax.checks import host_ids
from sparsejax.sharding import BATCH_AXES, constrain

# Two float32 buffers of tokens x chunk exist at a time in the backward pass: with 2048 entries they
# are about one layer's activations at d_model 512 to 2048, so the vocabulary does not set the peak.
DEFAULT_CHUNK = 2048


def cross_entropy(
    hidden: Array,
    weight: Array,
    targets: Array,
    *,
    chunk: int = DEFAULT_CHUNK,
) -> Array:
    """-log softmax(hidden weight^T)[target] per token: hidden (B, T, D), weight (V, D) -> (B, T).

    Logits and sums are float32 (matmul inputs keep their dtype). Gradients reach hidden and weight.

    Args:
      hidden: (B, T, D).
      weight: (V, D), same dtype.
      targets: (B, T) int, in [0, V); an id outside gives NaN.
      chunk: the largest number of vocabulary entries whose logits exist at a time.

    Returns:
      (B, T) float32, nats.

    Raises:
      ValueError: `chunk` is not positive, or dtypes or shapes do not fit.
    """
    check_arguments("cross_entropy", hidden, weight, targets, chunk)
    return _cross_entropy(_num_chunks(weight.shape[0], chunk), hidden, weight, host_ids(targets))


def check_arguments(name: str, hidden: Array, weight: Array, targets: Array, chunk: int) -> None:
    """Raises ValueError, as `name`, unless the arguments of a cross-entropy fit each other."""
    if chunk < 1:
        raise ValueError(f"{name}: chunk must be positive, got {chunk}")
    if hidden.dtype != weight.dtype or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{name}: hidden {hidden.dtype}{list(hidden.shape)} and weight "
            f"{weight.dtype}{list(weight.shape)} must share dtype and last dimension"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{name}: targets must have shape {list(hidden.shape[:-1])}, got {list(targets.shape)}"
        )


def _num_chunks(vocab: int, chunk: int) -> int:
    """The fewest chunks of at most `chunk` entries, or up to twice as many if no padding is needed.

    Padding is not needed where chunks are equal and a multiple of 16 (so that devices share them).
    """
    fewest = -(-vocab // chunk)
    return next((n for n in range(fewest, 2 * fewest) if vocab % (16 * n) == 0), fewest)


def _chunked(n: int, weight: Array) -> Array:
    """(V, D) -> (C, n, D), zero rows appended so that chunks are equal and can be shared."""
    vocab, d = weight.shape
    multiple = n if n == 1 else 16 * n
    weight = jnp.pad(weight, ((0, -vocab % multiple), (0, 0)))
    return constrain(weight.reshape(-1, n, d), "tensor", None, None)


def _logits(hidden: Array, chunks: Array, j: Array, n: int, vocab: int) -> tuple[Array, Array]:
    """Float32 logits (B, T, C) of chunk j and the ids (C,) they belong to; padding gets -inf."""
    rows = jax.lax.dynamic_index_in_dim(chunks, j, axis=1, keepdims=False)
    out = jnp.einsum("btd,cd->btc", hidden, rows, preferred_element_type=jnp.float32)
    ids = jnp.arange(chunks.shape[0], dtype=jnp.int32) * n + j
    if chunks.shape[0] * n != vocab:
        out = jnp.where(ids < vocab, out, -jnp.inf)
    return constrain(out, BATCH_AXES, None, "tensor"), ids


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(n: int, hidden: Array, weight: Array, targets: Array) -> Array:
    return _forward(n, hidden, weight, targets)[0]


def _forward(n: int, hidden: Array, weight: Array, targets: Array):
    vocab, chunks = weight.shape[0], _chunked(n, weight)

    def body(j, carry):
        peak, total, at_target = carry
        out, ids = _logits(hidden, chunks, j, n, vocab)
        new_peak = jnp.maximum(peak, jnp.max(out, axis=-1))
        total = total * jnp.exp(peak - new_peak)
        total = total + jnp.sum(jnp.exp(out - new_peak[..., None]), axis=-1)
        hit = targets[..., None] == ids
        at_target = at_target + jnp.sum(jnp.where(hit, out, 0.0), axis=-1)
        return new_peak, total, at_target

    shape = targets.shape
    zeros = jnp.zeros(shape, jnp.float32)
    start = (jnp.full(shape, -jnp.inf, jnp.float32), zeros, zeros)
    peak, total, at_target = jax.lax.fori_loop(0, n, body, start)
    log_norm = peak + jnp.log(total)
    known = (targets >= 0) & (targets < vocab)
    loss = jnp.where(known, log_norm - at_target, jnp.nan)
    return loss, (hidden, weight, targets, log_norm)


def _backward(n: int, residuals, dloss: Array):
    hidden, weight, targets, log_norm = residuals
    vocab, chunks = weight.shape[0], _chunked(n, weight)

    def body(j, carry):
        dhidden, dchunks = carry
        out, ids = _logits(hidden, chunks, j, n, vocab)
        hit = (targets[..., None] == ids).astype(jnp.float32)
        dlogits = (jnp.exp(out - log_norm[..., None]) - hit) * dloss[..., None]
        dlogits = dlogits.astype(hidden.dtype)
        rows = jax.lax.dynamic_index_in_dim(chunks, j, axis=1, keepdims=False)
        # float32 across chunks: n roundings to bfloat16 would add up.
        dhidden = dhidden + jnp.einsum(
            "btc,cd->btd", dlogits, rows, preferred_element_type=jnp.float32
        )
        drows = jnp.einsum("btc,btd->cd", dlogits, hidden).astype(chunks.dtype)
        return dhidden, jax.lax.dynamic_update_index_in_dim(dchunks, drows, j, axis=1)

    start = (
        constrain(jnp.zeros(hidden.shape, jnp.float32), BATCH_AXES, None, None),
        jnp.zeros_like(chunks),
    )
    dhidden, dchunks = jax.lax.fori_loop(0, n, body, start)
    dweight = dchunks.reshape(-1, weight.shape[1])[:vocab]
    return dhidden.astype(hidden.dtype), dweight, None


_cross_entropy.defvjp(_forward, _backward)


def l1_coefficient(step: Array | int, coeff: float, start: int, ramp: int) -> Array:
    """The L1 coefficient at `step`: 0 before `start`, a linear ramp of `ramp` steps, then `coeff`.

    With ramp = 0 it is `coeff` from step `start` on. Source: the warm-up of arXiv 2603.23198 uses
    5,000 steps without L1 and a ramp of 5,000.
    """
    done = jnp.asarray(step).astype(jnp.float32) - start
    share = jnp.clip(done / ramp, 0.0, 1.0) if ramp > 0 else (done >= 0).astype(jnp.float32)
    return coeff * share
