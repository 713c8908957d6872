"""Backward over rows: gradients of the hidden entries, then dx, for the tokens that were walked.

Two kernels, one program per token, because they want different shapes of work. The first needs a
dot product per entry, dh = dy . down row, and takes several entries at a time so that their
reductions share one trip through shared memory. The second only accumulates, dx += dpre * gate row
+ dup * up row, and streams. Together they read each of the three weight rows of an entry once. The
forward walk has stored u = x . up row per entry (2 bytes), so x is not read at all.

The first kernel writes the gradients twice: in the token's order for the second kernel, and in the
order by neuron (pallas_triton_neurons.py) for the weight gradients.

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


class Entries(NamedTuple):
    """Per entry, in the order by neuron: its token (int32), h, dpre and dup (None if not gated)."""

    token: Array
    h: Array
    dpre: Array
    dup: Array | None


def _sign(h: Array) -> Array:
    """-1, 0 or 1, and NaN for NaN."""
    one = jnp.where(h > 0, 1.0, jnp.where(h < 0, -1.0, 0.0))
    return jnp.where(h != h, h, one)


def _hidden_kernel(*refs, gated, group):
    limit_ref, nnz_ref, column_ref, value_ref, dy_ref, dl1_ref, down_ref = refs[:7]
    bits_ref, before_ref, start_ref = refs[7:10]
    saved_ref = refs[10] if gated else None
    outputs = refs[11 if gated else 10 :]
    token_ref, h_ref, dpre_ref, row_dpre_ref = outputs[:4]
    dup_ref, row_dup_ref = outputs[4:] if gated else (None, None)
    token = pl.program_id(0)
    capacity = token_ref.shape[0] - group
    parts = tl.split_width(dy_ref.shape[1])
    lane = lax.broadcasted_iota(jnp.int32, (group,), 0)
    limit, nnz = limit_ref[0], nnz_ref[token]

    def fetch(k):
        slot = k * group + lane
        live = slot < nnz
        column = tl.load(column_ref.at[token, slot], mask=live, other=0)
        value = tl.load(value_ref.at[token, slot], mask=live, other=0.0)
        if saved_ref is None:
            return column, value, value
        return column, value, tl.load(saved_ref.at[token, slot], mask=live, other=0.0)

    @pl.when(jnp.logical_and(limit >= 0, nnz <= limit))
    def _walked():
        dy = [dy_ref[token, pl.ds(o, s)].astype(jnp.float32) for o, s in parts]
        dl1 = dl1_ref[token]

        def step(k, carry):
            column, value, saved = carry
            slot = k * group + lane
            live = slot < nnz
            dh = jnp.zeros((group,), jnp.float32)
            for (o, s), part in zip(parts, dy, strict=True):
                at = (column[:, None], o + lax.broadcasted_iota(jnp.int32, (s,), 0)[None, :])
                rows = tl.load(down_ref.at[at], mask=live[:, None], other=0.0)
                dh += jnp.sum(rows.astype(jnp.float32) * part[None, :], axis=1)
            position = neurons.position(bits_ref, before_ref, start_ref, token, column)
            # Masked-out lanes get a place of their own behind the entries.
            position = jnp.where(live, position, capacity + lane)
            following = fetch(k + 1)
            pre, u = value.astype(jnp.float32), saved.astype(jnp.float32)
            h = pre * u if gated else pre
            dh += dl1 * _sign(h)
            dpre = (dh * u if gated else dh).astype(dpre_ref.dtype)
            tl.store(token_ref.at[position], token + 0 * lane, mask=live)
            tl.store(h_ref.at[position], h.astype(h_ref.dtype), mask=live)
            tl.store(dpre_ref.at[position], dpre, mask=live)
            tl.store(row_dpre_ref.at[token, slot], dpre, mask=live)
            if gated:
                dup = (dh * pre).astype(dup_ref.dtype)
                tl.store(dup_ref.at[position], dup, mask=live)
                tl.store(row_dup_ref.at[token, slot], dup, mask=live)
            return following

        lax.fori_loop(0, (nnz + group - 1) // group, step, fetch(token - token))


def hidden(
    limit: Array,
    nnz: Array,
    columns: Array,
    values: Array,
    saved: Array | None,
    dy: Array,
    dl1: Array,
    down: Array,
    lists: NeuronLists,
    *,
    capacity: int,
    group: int,
    warps: int,
) -> tuple[Entries, Array, Array | None]:
    """dh = dy . down row + dl1 sign(h) per entry; dpre = dh u, dup = dh pre, h = pre u.

    Args:
      limit, nnz, columns, values: the lists by token, as `pallas_triton_walk.lists` gives them.
      saved: (M, width) u of every entry, or None in the non-gated form (then dpre = dh, h = pre).
      dy: (M, D); dl1 (M,) float32.
      down: (F, D).
      lists: places of the entries by neuron.
      capacity: at least the number of entries.
      group: entries per step, a power of two.
      warps: warps of one token.

    Returns:
      The entries in the order by neuron, and dpre and dup (M, width) in the order by token.
    """
    gated, dtype = saved is not None, dy.dtype
    by_neuron = jax.ShapeDtypeStruct((capacity + group,), dtype)
    by_token = jax.ShapeDtypeStruct(columns.shape, dtype)
    token, h, dpre, row_dpre, *rest = tl.pallas_call(
        functools.partial(_hidden_kernel, gated=gated, group=group),
        name="gated_ffn_grad_hidden",
        grid=(dy.shape[0],),
        out_shape=[
            jax.ShapeDtypeStruct(by_neuron.shape, jnp.int32),
            *[by_neuron, by_neuron, by_token],
            *([by_neuron, by_token] if gated else []),
        ],
        num_warps=warps,
        num_stages=1,
    )(
        *[limit, nnz, columns, values, dy, dl1, down],
        *[lists.bits, lists.before, lists.start],
        *([saved] if gated else []),
    )
    dup, row_dup = rest if gated else (None, None)
    return Entries(token, h, dpre, dup), row_dpre, row_dup


def _dx_kernel(*refs, unroll):
    limit_ref, nnz_ref, column_ref, dx_ref = *refs[:3], refs[-1]
    pairs = list(zip(refs[3:-1:2], refs[4:-1:2], strict=True))  # (weights, per-entry factors)
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
            found.append((column_ref[token, at], [jnp.where(real, f, 0.0) for f in factors]))
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
    width: int,
    *,
    unroll: int,
    warps: int,
) -> Array:
    """dx[t] = sum over its entries n and pairs (w, f) of f[t, n] w[n]; long rows stay unwritten.

    Args:
      limit, nnz, columns: the lists by token.
      factors: pairs of weights (F, D) and per-entry factors (M, columns' width).
      width: D.
      unroll: entries per step.
      warps: warps of one token.
    """
    shape = jax.ShapeDtypeStruct((nnz.shape[0], width), factors[0][0].dtype)
    [result] = tl.pallas_call(
        functools.partial(_dx_kernel, unroll=unroll),
        name="gated_ffn_grad_x",
        grid=(nnz.shape[0],),
        out_shape=[shape],
        num_warps=warps,
        num_stages=1,
    )(limit, nnz, columns, *[array for pair in factors for array in pair])
    return result
