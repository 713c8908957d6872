"""KL divergence of teacher and student on logits, in one walk over chunks of tokens.

Like `sparsejax.fused_loss`: a chunk is a few positions of every row with the whole vocabulary, so
both normalisers are known at once and the student's gradients follow in the same chunk. Neither
model's logits exist for more than one chunk, and the teacher's are made from its hidden states,
which are V / D times smaller. A chunk holds about tokens x `chunk` logits of each model, so the
peak does not grow with the vocabulary; the gradient of the student's head is kept in float32 (V, D)
while it adds up. The student's cross-entropy comes along for nothing, its logits being there.

Under a mesh each device walks its own rows and its own part of the vocabulary in `shard_map`; the
normalisers are summed over `tensor` per chunk, and the head's gradient over the batch axes once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sparsejax.losses import DEFAULT_CHUNK, check_arguments
from sparsejax.sharding import BATCH_AXES


def distillation_loss(
    hidden: Array,
    head: Array,
    teacher_hidden: Array,
    teacher_head: Array,
    targets: Array,
    weights: Array,
    *,
    kl_weight: float = 1.0,
    lm_weight: float = 0.0,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[Array, Array, Array]:
    """sum_t weights_t * (a KL_t + b CE_t), and the two sums; a = kl_weight, b = lm_weight.

    KL_t = sum_v p_v (log p_v - log q_v) with p = softmax(teacher_hidden_t teacher_head^T) and
    q = softmax(hidden_t head^T); CE_t = -log q[target_t]. Everything adds up in float32. Gradients
    of the loss reach hidden and head, none reaches the teacher, and the two sums have none.

    Args:
      hidden: (B, T, D) of the student, after its final norm.
      head: (V, D), same dtype.
      teacher_hidden: (B, T, D') of the teacher; D' may be another width.
      teacher_head: (V, D'), same dtype as teacher_hidden.
      targets: (B, T) int, in [0, V); an id outside makes CE NaN where its weight is not 0.
      weights: (B, T) float32, for example mask / number of unmasked tokens; not differentiated.
      kl_weight: a.
      lm_weight: b.
      chunk: logits of one model alive at a time, per token of the batch (whole positions).

    Returns:
      (loss, kl, ce), float32 scalars, nats.

    Raises:
      ValueError: `chunk` is not positive, dtypes or shapes do not fit, or vocabularies differ.

    Source: the objective of Puzzle, arXiv 2411.19146 (KL on logits, no cross-entropy).
    """
    name = "distillation_loss"
    check_arguments(name, hidden, head, targets, chunk)
    check_arguments(f"{name} (teacher)", teacher_hidden, teacher_head, targets, chunk)
    if head.shape[0] != teacher_head.shape[0]:
        raise ValueError(
            f"{name}: student and teacher must share one vocabulary, got heads of {head.shape[0]} "
            f"and {teacher_head.shape[0]} rows"
        )
    if weights.shape != targets.shape:
        raise ValueError(
            f"{name}: weights must have shape {list(targets.shape)} like targets, got "
            f"{list(weights.shape)}"
        )
    length, vocab = targets.shape[1], head.shape[0]
    least = math.ceil(vocab / chunk)
    n = next((n for n in range(min(least, length), length + 1) if length % n == 0), length)
    fixed = jax.lax.stop_gradient((teacher_hidden, teacher_head, weights.astype(jnp.float32)))
    scales = float(kl_weight), float(lm_weight)
    sums: Any = _loss(n, scales, hidden, head, fixed[0], fixed[1], targets, fixed[2])
    loss, kl, ce = sums
    return loss, *jax.lax.stop_gradient((kl, ce))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(n: int, scales: tuple[float, float], *arrays: Array) -> tuple[Array, Array, Array]:
    return _sharded(n, scales, False, *arrays)[:3]


def _forward(n: int, scales: tuple[float, float], *arrays: Array):
    *sums, dhidden, dhead = _sharded(n, scales, True, *arrays)
    return tuple(sums), (dhidden, dhead)


def _backward(n: int, scales: tuple[float, float], residuals, cotangents):
    dhidden, dhead = residuals
    dloss = cotangents[0]
    scaled = (dloss * dhidden.astype(jnp.float32)).astype(dhidden.dtype)
    return scaled, (dloss * dhead).astype(dhidden.dtype), None, None, None, None


_loss.defvjp(_forward, _backward)


def _sharded(n: int, scales: tuple[float, float], gradients: bool, *arrays: Array):
    """`_walk` on each device's rows and part of the vocabulary, or plainly without a mesh."""
    walk = functools.partial(_walk, n, scales, gradients)
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
    if arrays[0].shape[0] % math.prod(mesh.shape[a] for a in batch):
        batch = ()
    divides = "tensor" in auto and not arrays[1].shape[0] % mesh.shape["tensor"]
    tensor = "tensor" if divides else None
    if not batch and tensor is None:
        return walk((), None, *arrays)
    rows, vocab = P(batch or None), P(tensor)
    grads = (rows, vocab) if gradients else (None, None)
    return jax.shard_map(
        functools.partial(walk, batch, tensor),
        in_specs=(rows, vocab, rows, vocab, rows, rows),
        out_specs=(P(), P(), P(), *grads),
        axis_names={*batch, *((tensor,) if tensor else ())},
        check_vma=False,
    )(*arrays)


def _walk(
    n: int,
    scales: tuple[float, float],
    gradients: bool,
    batch: tuple[str, ...],
    tensor: str | None,
    *arrays: Array,
):
    """Loss, KL, CE, d/dhidden (B, T, D) and d/dhead (V, D) float32 of this device's share."""
    hidden, head, teacher_hidden, teacher_head, targets, weights = arrays
    vocab, d = head.shape
    rows, length = targets.shape
    first_id = jax.lax.axis_index(tensor) * vocab if tensor else jnp.int32(0)
    ids = first_id + jnp.arange(vocab, dtype=jnp.int32)
    kl_weight, lm_weight = scales

    def over_vocab(reduce, x: Array) -> Array:
        return reduce(x, tensor) if tensor else x

    def log_softmax(h: Array, weight: Array) -> Array:
        logits = jnp.einsum("bsd,vd->bsv", h, weight, preferred_element_type=jnp.float32)
        peak = over_vocab(jax.lax.pmax, jnp.max(logits, axis=-1))
        total = over_vocab(jax.lax.psum, jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1))
        return logits - (peak + jnp.log(total))[..., None]

    def body(dhead, chunk):
        h, teacher_h, target, w = chunk
        log_q, log_p = log_softmax(h, head), log_softmax(teacher_h, teacher_head)
        p = jnp.exp(log_p)
        # A probability that is exactly 0 adds nothing, however small the student's is.
        each = jnp.where(p > 0, p * (log_p - log_q), jnp.where(p == 0, 0.0, jnp.nan))
        kl = over_vocab(jax.lax.psum, jnp.sum(each, axis=-1))
        hit = target[..., None] == ids
        found = over_vocab(jax.lax.psum, jnp.any(hit, axis=-1).astype(jnp.int32))
        at_target = over_vocab(jax.lax.psum, jnp.sum(jnp.where(hit, log_q, 0.0), axis=-1))
        ce = jnp.where(found == 1, -at_target, jnp.nan)
        sums = tuple(jnp.sum(jnp.where(w == 0, 0.0, w * x)) for x in (kl, ce))
        if not gradients:
            return dhead, (sums, None)
        dlogits = (kl_weight + lm_weight) * jnp.exp(log_q) - kl_weight * p
        if lm_weight:
            dlogits = dlogits - lm_weight * hit.astype(jnp.float32)
        dlogits = (dlogits * w[..., None]).astype(h.dtype)
        dh = jnp.einsum("bsv,vd->bsd", dlogits, head, preferred_element_type=jnp.float32)
        dh = over_vocab(jax.lax.psum, dh).astype(h.dtype)
        dhead = dhead + jnp.einsum("bsv,bsd->vd", dlogits, h, preferred_element_type=jnp.float32)
        return dhead, (sums, dh)

    chunks = jax.tree.map(
        lambda a: jnp.moveaxis(a.reshape(rows, n, length // n, *a.shape[2:]), 1, 0),
        (hidden, teacher_hidden, targets, weights),
    )
    start = jnp.zeros((vocab, d), jnp.float32) if gradients else None
    dhead, ((kls, ces), dhidden) = jax.lax.scan(body, start, chunks)
    kl, ce = jnp.sum(kls), jnp.sum(ces)
    if batch:
        kl, ce = jax.lax.psum((kl, ce), batch)
    loss = kl_weight * kl + (lm_weight * ce if lm_weight else 0.0)
    if dhidden is None:
        return loss, kl, ce, None, None
    if batch:
        dhead = jax.lax.psum(dhead, batch)
    return loss, kl, ce, jnp.moveaxis(dhidden, 0, 1).reshape(hidden.shape), dhead
