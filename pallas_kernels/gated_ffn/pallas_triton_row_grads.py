"""Backward over rows: gradients of the hidden entries, then dx, for the tokens that were walked.

Two kernels, one program per token, because they want different shapes of work. The first needs a
dot product per entry, dh = dy . down row: one warp holds the whole row, so that no sum crosses
warps, and has several rows on their way at once. The second only accumulates, dx += dpre * gate row
+ dup * up row, and streams. Together they read each of the three weight rows of an entry once. The
forward walk has stored u = x . up row per entry (2 bytes), so x is not read at all. A third kernel
moves the entries to the order by neuron (pallas_triton_neurons.py) for the weight gradients; doing
that inside the first cost more (0.35 ms against 0.22 + 0.05 at 16,384 x 30 entries, one H200).

Numerics: dot products and dx accumulate in float32; pre, u, h, dpre and dup are in x's dtype where
they are stored, as in the dense engine. Order of summation is fixed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton as tl
from pallas_kernels.gated_ffn import pallas_triton_neurons as neurons
from pallas_kernels.gated_ffn.pallas_triton_neurons import NeuronLists

_REORDER_CHUNK = 64


class Entries(NamedTuple):
    """Per entry, in the order by neuron: its token (int32), h, dpre and dup (None if not gated)."""

    token: Array
    h: Array
    dpre: Array
    dup: Array | None


def _sign(h: Array) -> Array:
    """-1, 0 or 1, and NaN for NaN."""
    # Not jnp.where over literals: for a scalar h that lowers to a boolean select.
    sign = (h > 0).astype(jnp.float32) - (h < 0).astype(jnp.float32)
    return jnp.where(h != h, h, sign)


def _hidden_kernel(*refs, gated, unroll):
    limit_ref, nnz_ref, column_ref, value_ref, dy_ref, dl1_ref, down_ref = refs[:7]
    saved_ref, dpre_ref, dup_ref = (refs[7], refs[8], refs[9]) if gated else (None, refs[7], None)
    token = pl.program_id(0)
    parts = tl.split_width(dy_ref.shape[1])
    limit, nnz = limit_ref[0], nnz_ref[token]

    def fetch(k):
        found = []
        for j in range(unroll):
            # Past the end the last entry is computed again, to the same result.
            at = jnp.minimum(k * unroll + j, nnz - 1)
            pre = value_ref[token, at].astype(jnp.float32)
            u = pre if saved_ref is None else saved_ref[token, at].astype(jnp.float32)
            found.append((at, column_ref[token, at].astype(jnp.int32), pre, u))
        return found

    @pl.when(jnp.logical_and(nnz > 0, jnp.logical_and(limit >= 0, nnz <= limit)))
    def _walked():
        dy = [dy_ref[token, pl.ds(o, s)].astype(jnp.float32) for o, s in parts]
        dl1 = dl1_ref[token]

        def step(k, entries):
            rows = [[down_ref[neuron, pl.ds(o, s)] for o, s in parts] for _, neuron, *_ in entries]
            following = fetch(k + 1)
            for (at, _, pre, u), row in zip(entries, rows, strict=True):
                parts_of = zip(row, dy, strict=True)
                products = [jnp.sum(w.astype(jnp.float32) * part) for w, part in parts_of]
                dh = sum(products[1:], products[0])
                h = pre * u if gated else pre
                dh += dl1 * _sign(h)
                dpre_ref[token, at] = (dh * u if gated else dh).astype(dpre_ref.dtype)
                if dup_ref is not None:
                    dup_ref[token, at] = (dh * pre).astype(dup_ref.dtype)
            return following

        lax.fori_loop(0, (nnz + unroll - 1) // unroll, step, fetch(token - token))


def hidden(
    limit: Array,
    nnz: Array,
    columns: Array,
    values: Array,
    saved: Array | None,
    dy: Array,
    dl1: Array,
    down: Array,
    *,
    unroll: int,
    warps: int,
) -> list[Array]:
    """dh = dy . down row + dl1 sign(h) per entry, then dpre = dh u and dup = dh pre, h = pre u.

    Args:
      limit, nnz, columns, values: the lists by token, as `pallas_triton_walk.lists` gives them.
      saved: (M, width) u of every entry, or None in the non-gated form (then dpre = dh, h = pre).
      dy: (M, D); dl1 (M,) float32.
      down: (F, D).
      unroll: entries per step.
      warps: warps of one token.

    Returns:
      dpre and, in the gated form, dup, shaped like `columns`, in dy's dtype.
    """
    gated = saved is not None
    by_token = jax.ShapeDtypeStruct(columns.shape, dy.dtype)
    return tl.pallas_call(
        functools.partial(_hidden_kernel, gated=gated, unroll=unroll),
        name="gated_ffn_grad_hidden",
        grid=(dy.shape[0],),
        out_shape=[by_token] * (2 if gated else 1),
        num_warps=warps,
        num_stages=1,
    )(limit, nnz, columns, values, dy, dl1, down, *([] if saved is None else [saved]))


def _reorder_kernel(*refs, gated):
    limit_ref, nnz_ref, column_ref, bits_ref, before_ref, start_ref, value_ref, dpre_ref = refs[:8]
    saved_ref, factor_refs = (refs[8], (dpre_ref, refs[9])) if gated else (None, (dpre_ref,))
    token_ref, h_ref, *out_refs = refs[10 if gated else 8 :]
    token = pl.program_id(0)
    limit, nnz = limit_ref[0], nnz_ref[token]
    capacity = token_ref.shape[0] - _REORDER_CHUNK
    lane = lax.broadcasted_iota(jnp.int32, (_REORDER_CHUNK,), 0)

    def step(k, carry):
        slot = k * _REORDER_CHUNK + lane
        live = slot < nnz
        column = tl.load(column_ref.at[token, slot], mask=live, other=0).astype(jnp.int32)
        position = neurons.position(bits_ref, before_ref, start_ref, token, column)
        # Masked-out lanes get a place of their own behind the entries.
        position = jnp.where(live, position, capacity + lane)
        h = tl.load(value_ref.at[token, slot], mask=live, other=0.0)
        if saved_ref is not None:
            u = tl.load(saved_ref.at[token, slot], mask=live, other=0.0)
            h = (h.astype(jnp.float32) * u.astype(jnp.float32)).astype(h_ref.dtype)
        tl.store(token_ref.at[position], token + 0 * lane, mask=live)
        tl.store(h_ref.at[position], h, mask=live)
        for ref, out_ref in zip(factor_refs, out_refs, strict=True):
            value = tl.load(ref.at[token, slot], mask=live, other=0.0)
            tl.store(out_ref.at[position], value, mask=live)
        return carry

    @pl.when(jnp.logical_and(limit >= 0, nnz <= limit))
    def _walked():
        lax.fori_loop(0, (nnz + _REORDER_CHUNK - 1) // _REORDER_CHUNK, step, 0)


def reorder(
    limit: Array,
    nnz: Array,
    columns: Array,
    values: Array,
    saved: Array | None,
    dpre: Array,
    dup: Array | None,
    lists: NeuronLists,
    *,
    capacity: int,
) -> Entries:
    """Token, h = pre u, dpre and dup of every entry, moved to the order by neuron.

    Args:
      limit, nnz, columns, values, saved, dpre, dup: the entries by token, as for `hidden`.
      lists: their places by neuron.
      capacity: at least the number of entries.
    """
    gated = saved is not None and dup is not None
    size = (capacity + _REORDER_CHUNK,)
    factor = jax.ShapeDtypeStruct(size, values.dtype)
    token, h, dpre, *rest = tl.pallas_call(
        functools.partial(_reorder_kernel, gated=gated),
        name="gated_ffn_grad_reorder",
        grid=(nnz.shape[0],),
        out_shape=[jax.ShapeDtypeStruct(size, jnp.int32), *[factor] * (3 if gated else 2)],
        num_warps=1,
        num_stages=1,
    )(
        *[limit, nnz, columns, lists.bits, lists.before, lists.start, values, dpre],
        *([saved, dup] if gated else []),
    )
    return Entries(token, h, dpre, rest[0] if gated else None)


def _dx_kernel(*refs, unroll, based):
    limit_ref, nnz_ref, column_ref, *inputs, dx_ref = refs
    base_ref = inputs.pop() if based else None
    pairs = list(zip(inputs[::2], inputs[1::2], strict=True))  # (weights, per-entry factors)
    token = pl.program_id(0)
    parts = tl.split_width(dx_ref.shape[1])
    limit, nnz = limit_ref[0], nnz_ref[token]

    def fetch(k):
        found = []
        for j in range(unroll):
            # Past the end the last entry is read again, with factor 0.
            at = jnp.minimum(k * unroll + j, nnz - 1)
            real = k * unroll + j < nnz
            factors = [ref[token, at].astype(jnp.float32) for _, ref in pairs]
            column = column_ref[token, at].astype(jnp.int32)
            found.append((column, [jnp.where(real, f, 0.0) for f in factors]))
        return found

    def step(k, carry):
        entries, dx = carry
        rows = [
            [[ref[neuron, pl.ds(o, s)] for o, s in parts] for ref, _ in pairs]
            for neuron, _ in entries
        ]
        following = fetch(k + 1)
        for (_, factors), row in zip(entries, rows, strict=True):
            for factor, weights in zip(factors, row, strict=True):
                dx = [a + factor * w.astype(jnp.float32) for a, w in zip(dx, weights, strict=True)]
        return following, dx

    def write(dx):
        for (o, s), part in zip(parts, dx, strict=True):
            if base_ref is not None:
                part += base_ref[token, pl.ds(o, s)].astype(jnp.float32)
            value = part.astype(dx_ref.dtype)
            tl.store(dx_ref.at[token, pl.ds(o, s)], value, eviction_policy="evict_first")

    zeros = [jnp.zeros((s,), jnp.float32) for _, s in parts]

    @pl.when(jnp.logical_and(nnz > 0, jnp.logical_and(limit >= 0, nnz <= limit)))
    def _walked():
        steps = (nnz + unroll - 1) // unroll
        write(lax.fori_loop(0, steps, step, (fetch(token - token), zeros))[1])

    @pl.when(nnz == 0)
    def _quiet():
        write(zeros)


def dx(
    limit: Array,
    nnz: Array,
    columns: Array,
    factors: list[tuple[Array, Array]],
    base: Array | None,
    *,
    unroll: int,
    warps: int,
) -> Array:
    """dx[t] = sum over its entries n and pairs (w, f) of f[t, n] w[n]; long rows stay unwritten.

    Args:
      limit, nnz, columns: the lists by token.
      factors: pairs of weights (F, D) and per-entry factors (M, columns' width).
      base: (M, D), added before rounding; None for zeros.
      unroll: entries per step.
      warps: warps of one token.
    """
    weights = factors[0][0]
    shape = jax.ShapeDtypeStruct((nnz.shape[0], weights.shape[1]), weights.dtype)
    inputs = [array for pair in factors for array in pair] + ([] if base is None else [base])
    [result] = tl.pallas_call(
        functools.partial(_dx_kernel, unroll=unroll, based=base is not None),
        name="gated_ffn_grad_x",
        grid=(nnz.shape[0],),
        out_shape=[shape],
        num_warps=warps,
        num_stages=1,
    )(limit, nnz, columns, *inputs)
    return result
