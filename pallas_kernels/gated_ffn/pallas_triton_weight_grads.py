"""Weight gradients from lists by neuron: one program per (segment of a neuron, slice of D).

    dgate[n] = sum over n's tokens t of dpre x[t],  dup[n] = sum of dup x[t],
    ddown[n] = sum of h dy[t]

Every program keeps its slice of the three sums in registers and streams rows of x and dy. Slices
run in the outer order of the grid, so that the part of x and dy in use (16 MB at 16,384 tokens)
stays in L2 while all neurons pass over it. A neuron is cut into segments of bounded length; one
with a single segment is written at once, the others leave float32 partial sums that a second kernel
adds in order. Nothing is added by atomics: same inputs, same bits, whoever finishes first.

A neuron that never fires has an empty segment and gets zeros.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton as tl
from pallas_kernels.gated_ffn.pallas_triton_neurons import NeuronLists
from pallas_kernels.gated_ffn.pallas_triton_row_grads import Entries

_REDUCERS = 512


def _slice(width: int, columns: int) -> tuple[Array, dict[str, Any]]:
    """This program's columns of D, and the mask where D does not fill them."""
    column = pl.program_id(1) * columns + lax.broadcasted_iota(jnp.int32, (columns,), 0)
    return column, {"mask": column < width} if width % columns else {}


def _load(ref: Any, at: Any, mask: dict[str, Any]) -> Array:
    return tl.load(ref.at[at], **mask).astype(jnp.float32)


def _write(grad_refs, base_refs, neuron, column, mask, sums):
    for i, (ref, total) in enumerate(zip(grad_refs, sums, strict=True)):
        if base_refs:
            total += _load(base_refs[i], (neuron, column), mask)
        tl.store(ref.at[neuron, column], total.astype(ref.dtype), **mask)


def _segment_kernel(*refs, grads, based, segment, unroll, columns):
    x_ref, dy_ref, token_ref, count_ref, start_ref, extra_ref, slot_ref = refs[:7]
    totals_ref, owner_ref = refs[7:9]
    factor_refs = refs[9 : 9 + grads]  # h, dpre, dup
    base_refs = refs[9 + grads : 9 + 2 * grads] if based else []
    grad_refs, part_ref = refs[-grads - 1 : -1], refs[-1]
    work, extras = pl.program_id(0), owner_ref.shape[0]
    column, mask = _slice(x_ref.shape[1], columns)

    # Extra segments come first: they are full, and a full one takes longest.
    @pl.when(jnp.logical_or(work >= extras, work < totals_ref[0]))
    def _live():
        is_extra = (work < extras).astype(jnp.int32)
        owner = owner_ref[jnp.minimum(work, extras - 1)]
        neuron = is_extra * owner + (1 - is_extra) * (work - extras)
        part = is_extra * (work - extra_ref[neuron] + 1)
        entries = count_ref[neuron]
        size = jnp.minimum(entries - part * segment, segment)
        first = start_ref[neuron] + part * segment

        def fetch(k):
            found = []
            for j in range(unroll):
                # Past the end the last entry is read again, with factor 0.
                at = first + jnp.maximum(jnp.minimum(k * unroll + j, size - 1), 0)
                real = k * unroll + j < size
                factors = [ref[at].astype(jnp.float32) for ref in factor_refs]
                found.append((token_ref[at], [jnp.where(real, f, 0.0) for f in factors]))
            return found

        def step(k, carry):
            found, sums = carry
            rows = [
                [tl.load(ref.at[token, column], **mask) for ref in (dy_ref, x_ref)]
                for token, _ in found
            ]
            following = fetch(k + 1)
            for (_, factors), (dy, x) in zip(found, rows, strict=True):
                operands = [dy.astype(jnp.float32)] + [x.astype(jnp.float32)] * (grads - 1)
                sums = [s + f * o for s, f, o in zip(sums, factors, operands, strict=True)]
            return following, sums

        zeros = [jnp.zeros((columns,), jnp.float32)] * grads
        steps = (size + unroll - 1) // unroll
        _, sums = lax.fori_loop(0, steps, step, (fetch(work - work), zeros))

        @pl.when(entries <= segment)
        def _whole():
            _write(grad_refs, base_refs, neuron, column, mask, sums)

        @pl.when(entries > segment)
        def _partial():
            for i, total in enumerate(sums):
                here = part_ref.at[grads * (slot_ref[neuron] + part) + i, column]
                tl.store(here, total, **mask)


def _reduce_kernel(*refs, grads, based, segment, columns):
    part_ref, count_ref, slot_ref = refs[:3]
    base_refs = refs[3 + grads : 3 + 2 * grads] if based else []
    grad_refs = refs[-grads:]
    features = grad_refs[0].shape[0]
    program, programs = pl.program_id(0), pl.num_programs(0)
    column, mask = _slice(grad_refs[0].shape[1], columns)

    def one(i, carry):
        neuron = program + i * programs
        entries = count_ref[neuron]

        @pl.when(entries > segment)
        def _several():
            slot = slot_ref[neuron]

            def step(k, sums):
                rows = [grads * (slot + k) + i for i in range(grads)]
                parts = [_load(part_ref, (row, column), mask) for row in rows]
                return [total + part for total, part in zip(sums, parts, strict=True)]

            zeros = [jnp.zeros((columns,), jnp.float32)] * grads
            sums = lax.fori_loop(0, (entries + segment - 1) // segment, step, zeros)
            _write(grad_refs, base_refs, neuron, column, mask, sums)

        return carry

    lax.fori_loop(0, (features - program + programs - 1) // programs, one, 0)


def _bias_kernel(count_ref, start_ref, dpre_ref, bias_ref, *, chunk):
    neuron = pl.program_id(0)
    entries, first = count_ref[neuron], start_ref[neuron]

    def step(k, total):
        at = k * chunk + lax.broadcasted_iota(jnp.int32, (chunk,), 0)
        dpre = tl.load(dpre_ref.at[first + at], mask=at < entries, other=0.0)
        return total + jnp.sum(dpre.astype(jnp.float32))

    steps = (entries + chunk - 1) // chunk
    bias_ref[neuron] = lax.fori_loop(0, steps, step, jnp.float32(0))


def weights(
    x: Array,
    dy: Array,
    lists: NeuronLists,
    entries: Entries,
    bases: list[Array] | None,
    *,
    segment: int,
    unroll: int,
    columns: int,
    warps: int,
) -> list[Array]:
    """ddown, dgate, dup (F, D) in x's dtype; ddown and dup in the non-gated form.

    Args:
      x, dy: (M, D).
      lists, entries: the entries in the order by neuron.
      bases: float32 (F, D) each, added before rounding; None for zeros.
      segment: most entries of one program, as in `lists`.
      unroll: entries per step.
      columns: of D per program, a power of two.
      warps: of one program.
    """
    width, features = x.shape[1], lists.entries.shape[0]
    factors = [f for f in (entries.h, entries.dpre, entries.dup) if f is not None]
    grads, based = len(factors), bases is not None
    # A neuron with k > 1 segments has k - 1 extras and k slots.
    slots = 2 * lists.owner.shape[0]
    slices = pl.cdiv(width, columns)
    static = {"grads": grads, "based": based, "segment": segment, "columns": columns}
    shapes = [jax.ShapeDtypeStruct((features, width), x.dtype)] * grads
    *sums, parts = tl.pallas_call(
        functools.partial(_segment_kernel, unroll=unroll, **static),
        name="gated_ffn_grad_weights",
        grid=(lists.owner.shape[0] + features, slices),
        out_shape=[*shapes, jax.ShapeDtypeStruct((grads * slots, width), jnp.float32)],
        num_warps=warps,
        num_stages=1,
    )(
        *[x, dy, entries.token, lists.entries, lists.start, lists.extra, lists.slot],
        *[lists.totals, lists.owner, *factors, *(bases or [])],
    )
    return tl.pallas_call(
        functools.partial(_reduce_kernel, **static),
        name="gated_ffn_grad_weights_reduce",
        # Few neurons have several segments, and 45,000 programs that only look cost 28 us.
        grid=(min(features, _REDUCERS), slices),
        out_shape=shapes,
        num_warps=warps,
        num_stages=1,
        aliases={3 + i: i for i in range(grads)},
    )(parts, lists.entries, lists.slot, *sums, *(bases or []))


def bias(lists: NeuronLists, entries: Entries) -> Array:
    """(F,) float32: sum of dpre over each neuron's tokens."""
    features = lists.entries.shape[0]
    [result] = tl.pallas_call(
        functools.partial(_bias_kernel, chunk=128),
        name="gated_ffn_grad_bias",
        grid=(features,),
        out_shape=[jax.ShapeDtypeStruct((features,), jnp.float32)],
        num_warps=1,
        num_stages=1,
    )(lists.entries, lists.start, entries.dpre)
    return result
