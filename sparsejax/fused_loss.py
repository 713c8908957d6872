"""Weighted cross-entropy and its gradients in one walk over chunks of tokens: the training loss.

`losses.cross_entropy` walks the vocabulary and has to compute every logit a second time in its
backward pass, because the normaliser is known only at the end. Here a chunk is a few positions of
every row with the whole vocabulary: its normaliser is known at once, so the gradients of that
chunk follow immediately and no logit is computed twice. On one H200 (65,536 tokens, D 768,
V 49152, bfloat16) that is 33 to 37 ms for loss and gradients against 47. The price: the gradient
of the head is kept in float32 (V, D) while it adds up, and per-token losses are not returned.

A chunk has about as many logits as tokens x 2048, so the peak does not grow with the vocabulary.
Under a mesh each device walks its own rows and its own part of the vocabulary in `shard_map`; the
normaliser is summed over `tensor` per chunk, and the head's gradient over the batch axes once.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sparsejax.checks import host_ids
from sparsejax.losses import DEFAULT_CHUNK, check_arguments
from sparsejax.sharding import BATCH_AXES


def weighted_cross_entropy(
    hidden: Array, weight: Array, targets: Array, weights: Array, *, chunk: int = DEFAULT_CHUNK
) -> Array:
    """sum_t weights_t * -log softmax(hidden_t weight^T)[target_t], a float32 scalar.

    Logits, sums and the head's gradient add up in float32. Gradients reach hidden and weight.

    Args:
      hidden: (B, T, D).
      weight: (V, D), same dtype.
      targets: (B, T) int, in [0, V); an id outside makes the loss NaN where its weight is not 0.
      weights: (B, T) float32, for example mask / number of unmasked tokens; not differentiated.
      chunk: logits alive at a time, per token of the batch (whole positions, at least one).

    Returns:
      () float32, nats.

    Raises:
      ValueError: `chunk` is not positive, or dtypes or shapes do not fit.
    """
    check_arguments("weighted_cross_entropy", hidden, weight, targets, chunk)
    if weights.shape != targets.shape:
        raise ValueError(
            f"weighted_cross_entropy: weights must have shape {list(targets.shape)} like targets, "
            f"got {list(weights.shape)}"
        )
    num_chunks = _divisor_at_least(targets.shape[1], math.ceil(weight.shape[0] / chunk))
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    return _loss(num_chunks, hidden, weight, host_ids(targets), weights)


def pays(rows: int, length: int, vocab: int, chunk: int = DEFAULT_CHUNK) -> bool:
    """Whether one walk over a device's (rows, length) tokens beats `losses.cross_entropy`.

    Each chunk reads and writes the head's float32 gradient, which 512 tokens or more outweigh
    (estimated from bytes and FLOPs of an H200; with one chunk it costs nothing). A length with few
    divisors makes many small chunks.
    """
    num_chunks = _divisor_at_least(length, math.ceil(vocab / chunk))
    return num_chunks == 1 or rows * length // num_chunks >= 512


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(n: int, hidden: Array, weight: Array, targets: Array, weights: Array) -> Array:
    return _sharded(n, False, hidden, weight, targets, weights)[0]


def _forward(n: int, hidden: Array, weight: Array, targets: Array, weights: Array):
    loss, dhidden, dweight = _sharded(n, True, hidden, weight, targets, weights)
    return loss, (dhidden, dweight)


def _backward(n: int, residuals, dloss: Array):
    dhidden, dweight = residuals
    scaled = (dloss * dhidden.astype(jnp.float32)).astype(dhidden.dtype)
    return scaled, (dloss * dweight).astype(dhidden.dtype), None, None


_loss.defvjp(_forward, _backward)


def _sharded(n: int, gradients: bool, hidden, weight, targets, weights):
    """`_walk` on each device's rows and part of the vocabulary, or plainly without a mesh."""
    walk = functools.partial(_walk, n, gradients)
    mesh = jax.sharding.get_abstract_mesh()
    auto = (
        []
        if mesh.empty
        else [
            name
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Auto and mesh.shape[name] > 1
        ]
    )
    batch = tuple(a for a in BATCH_AXES if a in auto)
    if hidden.shape[0] % math.prod(mesh.shape[a] for a in batch):
        batch = ()
    tensor = "tensor" if "tensor" in auto and not weight.shape[0] % mesh.shape["tensor"] else None
    if not batch and tensor is None:
        return walk((), None, hidden, weight, targets, weights)
    rows = P(batch or None)
    grads = (rows, P(tensor)) if gradients else (None, None)
    return jax.shard_map(
        functools.partial(walk, batch, tensor),
        in_specs=(rows, P(tensor), rows, rows),
        out_specs=(P(), *grads),
        axis_names={*batch, *((tensor,) if tensor else ())},
        check_vma=False,
    )(hidden, weight, targets, weights)


def _walk(n: int, gradients: bool, batch: tuple[str, ...], tensor: str | None, *arrays: Array):
    """Loss, d/dhidden (B, T, D), d/dweight (V, D) float32 of this device's rows and vocabulary."""
    hidden, weight, targets, weights = arrays
    vocab, d = weight.shape
    rows, length = targets.shape
    first_id = jax.lax.axis_index(tensor) * vocab if tensor else jnp.int32(0)
    ids = first_id + jnp.arange(vocab, dtype=jnp.int32)

    def over_vocab(reduce, x: Array) -> Array:
        return reduce(x, tensor) if tensor else x

    def body(dweight, chunk):
        h, target, w = chunk
        logits = jnp.einsum("bsd,vd->bsv", h, weight, preferred_element_type=jnp.float32)
        peak = over_vocab(jax.lax.pmax, jnp.max(logits, axis=-1))
        total = over_vocab(jax.lax.psum, jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1))
        hit = target[..., None] == ids
        at_target = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
        found = over_vocab(jax.lax.psum, jnp.any(hit, axis=-1).astype(jnp.int32))
        log_norm = peak + jnp.log(total)
        ce = jnp.where(found == 1, log_norm - over_vocab(jax.lax.psum, at_target), jnp.nan)
        loss = jnp.sum(jnp.where(w == 0, 0.0, w * ce))
        if not gradients:
            return dweight, (loss, None)
        dlogits = (jnp.exp(logits - log_norm[..., None]) - hit.astype(jnp.float32)) * w[..., None]
        dlogits = dlogits.astype(h.dtype)
        dh = jnp.einsum("bsv,vd->bsd", dlogits, weight, preferred_element_type=jnp.float32)
        dh = over_vocab(jax.lax.psum, dh).astype(h.dtype)
        dweight = dweight + jnp.einsum(
            "bsv,bsd->vd", dlogits, h, preferred_element_type=jnp.float32
        )
        return dweight, (loss, dh)

    chunks = jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(rows, n, length // n, *a.shape[2:]), 1, 0),
        (hidden, targets, weights),
    )
    start = jnp.zeros((vocab, d), jnp.float32) if gradients else None
    dweight, (losses, dhidden) = jax.lax.scan(body, start, chunks)
    loss = jnp.sum(losses)
    if batch:
        loss = jax.lax.psum(loss, batch)
    if dhidden is None:
        return loss, None, None
    if batch:
        dweight = jax.lax.psum(dweight, batch)
    return loss, jnp.moveaxis(dhidden, 0, 1).reshape(hidden.shape), dweight


def _divisor_at_least(length: int, least: int) -> int:
    """The smallest divisor of `length` that is at least `least` (`length` itself at most)."""
    return next((n for n in range(min(least, length), length + 1) if length % n == 0), length)
