"""Row walk: list each token's active neurons, then visit only their rows of `up` and `down`.

Two kernels, one program per token in both. The first reads a row of the dense pre-activations once
and writes the active columns: comparisons become 32-bit words by a sum over a reshaped axis, which
stays in registers, and only the words (not the columns) go through a scan. The second holds the
token's x and its y in registers, loads the two weight rows of one neuron at a time, and keeps h in
a register; l1 falls out. Column numbers and pre-activations are fetched one entry ahead. The lists
carry the values: fetching them from the dense matrix during the walk costs a tenth of its time.

Why: at 0.5 % density the walk moves a hundredth of the dense matmuls' arithmetic, and its time is
the weight rows' bandwidth from L2 (about 9 TB/s on an H200), nothing else. Two kernels rather than
one, because the lists in front of the walk cost registers, and so occupancy, all through the walk.

Numerics: x . up row and y accumulate in float32; h is not rounded before the down projection, so
the walk is closer to float32 than the dense engine. Order of summation is fixed: same inputs, same
bits. Rows of neurons that do not fire are never read, so a NaN there does not reach y.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton as tl
from pallas_kernels import dispatch
from pallas_kernels.gated_ffn import pallas_triton_long_rows as long_rows
from pallas_kernels.gated_ffn.pallas_triton_long_rows import LongRows


def _column_parts(features: int, chunk: int) -> list[tuple[int, int, bool]]:
    """(offset, size, masked) of the steps over a row: full chunks, then a power of two >= 32."""
    parts = [(offset, chunk, False) for offset in range(0, features - chunk + 1, chunk)]
    rest = features % chunk
    if rest:
        size = max(32, pl.next_power_of_2(rest))
        parts.append((features - rest, size, size != rest))
    return parts


def _list_active(
    pre_ref: Any,
    bias_ref: Any,
    hot_ref: Any,
    column_ref: Any,
    value_ref: Any,
    token: Array,
    parts: Any,
    width: int,
):
    """Writes the active columns of row `token`, ascending, and their values; returns their number.

    A value is pre + bias.
    The first `width` entries are kept, the count is of all of them. Columns whose bit is set in the
    words of `hot_ref` do not count as active.
    """
    features = pre_ref.shape[1]

    def value(at, **mask):
        bias = None if bias_ref is None else tl.load(bias_ref.at[at], **mask)
        return tl.add_bias(tl.load(pre_ref.at[token, at], **mask), bias)

    total = jnp.int32(0)
    for offset, size, masked in parts:
        columns = offset + lax.broadcasted_iota(jnp.int32, (size,), 0)
        mask = {"mask": columns < features, "other": -1.0} if masked else {}
        words = tl.pack_bits(tl.is_active(value(columns, **mask)))
        lane = lax.broadcasted_iota(jnp.int32, (size // 32,), 0)
        if hot_ref is not None:
            word = offset // 32 + lane
            words &= ~tl.load(hot_ref.at[word], mask=word < hot_ref.shape[0], other=0)
        counts = lax.population_count(words)
        position = total + lax.cumsum(counts, axis=0) - counts

        def emit(_, carry, lane=lane, offset=offset):
            words, position = carry
            live = jnp.logical_and(words != 0, position < width)
            # Interpret mode needs a slot of their own for lanes that are masked out.
            slot = jnp.where(live, position, width + lane)
            column = offset + 32 * lane + tl.lowest_bit(words)
            tl.store(column_ref.at[token, slot], column.astype(column_ref.dtype), mask=live)
            tl.store(value_ref.at[token, slot], value(column, mask=live, other=0.0), mask=live)
            return words & (words - 1), position + 1

        lax.fori_loop(0, jnp.max(counts), emit, (words, position))
        total += jnp.sum(counts)
    return total


def _lists_kernel(*refs, parts, width, biased, split_hot, few):
    limit_ref, pre_ref = refs[:2]
    bias_ref = refs[3] if biased else None
    hot_ref = refs[3 + biased] if split_hot else None
    nnz_ref, column_ref, value_ref, count_ref, rows_ref, short_ref = refs[-6:]
    token = pl.program_id(0)
    limit = limit_ref[0]

    @pl.when(limit >= 0)
    def _list():
        nnz = _list_active(pre_ref, bias_ref, hot_ref, column_ref, value_ref, token, parts, width)
        nnz_ref[token] = nnz

        @pl.when(nnz > limit)
        def _defer():
            rows_ref[tl.next_slot(count_ref, token - token)] = token

        if few:

            @pl.when(jnp.logical_and(nnz > long_rows.SHORT, nnz <= limit))
            def _maybe_defer():
                slot = tl.next_slot(count_ref, token - token + 1)

                @pl.when(slot < few)
                def _fits():
                    short_ref[slot] = token

    @pl.when(limit < 0)
    def _all_rows():
        rows_ref[token] = token
        count_ref[0] = jnp.where(limit < 0, pre_ref.shape[0], limit)


def _list_chunk(features: int, chunk: int) -> int:
    return min(chunk, max(32, pl.next_power_of_2(features)))


def column_dtype(features: int) -> Any:
    """Integer type of the columns in a list: the lists are kept for the backward pass."""
    return jnp.uint16 if features <= 2**16 else jnp.int32


def list_slots(features: int, width: int, chunk: int) -> int:
    """Slots of a row of `lists`: its width, at least 1, and spare ones in interpret mode."""
    return max(1, width) + (_list_chunk(features, chunk) // 32 if dispatch.interpreting() else 0)


def lists(
    limit: Array,
    pre: Array,
    bias: Array | None,
    hot_words: Array | None,
    *,
    width: int,
    chunk: int,
    warps: int,
    few: int = 0,
) -> tuple[Array, Array, Array, LongRows]:
    """Active columns per row, and the rows that are too long to walk.

    Args:
      limit: (1,) int32; rows with more active columns are deferred, all rows when it is negative
        (then nothing is read or listed).
      pre: (M, F) pre-activations, less the bias.
      bias: (F,), added to every row here (a pass of its own costs 0.11 ms at 16,384 x 5,632 on an
        H200, a tenth of the layer); None for none.
      hot_words: (ceil(F / 32),) int32, bits of columns to leave out; None leaves none out.
      width: columns kept per row.
      chunk: columns per step.
      warps: warps per program.
      few: rows beyond `long_rows.SHORT` alone are kept apart up to this number; 0 for none.

    Returns:
      nnz (M,), columns (M, `list_slots`) in `column_dtype`, values likewise in pre's dtype; the
      long rows. Unspecified beyond what they count.
    """
    tokens, features = pre.shape
    slots = list_slots(features, width, chunk)
    chunk = _list_chunk(features, chunk)
    nnz, columns, values, *long = tl.pallas_call(
        functools.partial(
            _lists_kernel,
            parts=_column_parts(features, chunk),
            width=width,
            biased=bias is not None,
            split_hot=hot_words is not None,
            few=few,
        ),
        name="gated_ffn_lists",
        grid=(tokens,),
        out_shape=[
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
            jax.ShapeDtypeStruct((tokens, slots), column_dtype(features)),
            jax.ShapeDtypeStruct((tokens, slots), pre.dtype),
            jax.ShapeDtypeStruct((2,), jnp.int32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
            jax.ShapeDtypeStruct((max(1, few),), jnp.int32),
        ],
        num_warps=warps,
        num_stages=1,
        aliases={2: 3},
    )(limit, pre, jnp.zeros((2,), jnp.int32), *(a for a in (bias, hot_words) if a is not None))
    return nnz, columns, values, LongRows(*long)


def _walk_kernel(*refs, gated, based, few):
    limit_ref, count_ref, nnz_ref, column_ref, value_ref, x_ref, up_ref, down_ref = refs[:8]
    base_ref = refs[8] if based else None
    y_ref, l1_ref, *saved = refs[9 if based else 8 :]
    token = pl.program_id(0)
    parts = tl.split_width(x_ref.shape[1])

    def row(ref, at, **how):
        return [tl.load(ref.at[at, pl.ds(o, s)], **how).astype(jnp.float32) for o, s in parts]

    # Everything that waits for nothing else is asked for at once.
    x = row(x_ref, token, eviction_policy="evict_first") if gated else []
    limit = long_rows.walk_limit(limit_ref[0], (count_ref[0], count_ref[1]), few)
    nnz = nnz_ref[token]
    first, first_value = column_ref[token, 0].astype(jnp.int32), value_ref[token, 0]

    @pl.when(jnp.logical_and(limit >= 0, nnz <= limit))
    def _walk():
        def step(k, carry):
            neuron, value, l1, y = carry
            ups = row(up_ref, neuron) if gated else []
            downs = row(down_ref, neuron)
            after = jnp.minimum(k + 1, column_ref.shape[1] - 1)
            following = column_ref[token, after].astype(jnp.int32)
            next_value = value_ref[token, after]
            # Slots past the end hold anything; the last step must not ask for that row.
            following = jnp.where(k + 1 < nnz, following, neuron)
            h = value.astype(jnp.float32)
            if gated:
                products = [jnp.sum(a * b) for a, b in zip(x, ups, strict=True)]
                u = sum(products[1:], products[0])
                h *= u
                for ref in saved:  # for the backward pass
                    ref[token, k] = u.astype(ref.dtype)
            y = [acc + h * b for acc, b in zip(y, downs, strict=True)]
            return following, next_value, l1 + jnp.abs(h), y

        zeros = [jnp.zeros((s,), jnp.float32) for _, s in parts]
        *_, l1, y = lax.fori_loop(0, nnz, step, (first, first_value, jnp.float32(0), zeros))
        l1_ref[token] = l1
        for (o, s), part in zip(parts, y, strict=True):
            if base_ref is not None:
                part += base_ref[token, pl.ds(o, s)].astype(jnp.float32)
            value = part.astype(y_ref.dtype)
            tl.store(y_ref.at[token, pl.ds(o, s)], value, eviction_policy="evict_first")


def walk(
    limit: Array,
    count: Array,
    nnz: Array,
    columns: Array,
    values: Array,
    x: Array,
    up: Array,
    down: Array,
    base: Array | None,
    *,
    gated: bool,
    warps: int,
    save_up: bool = False,
    few: int = 0,
) -> list[Array]:
    """y (M, D) and l1 (M,) of the rows that are not deferred; the others stay unwritten.

    `limit` is the plan's, `count` that of `lists`' long rows, `few` what `lists` was given.
    `base` (M, D) is added to y before it rounds. With `save_up` also x . up row of every entry,
    shaped like `columns`, in x's dtype.
    """
    saved = [jax.ShapeDtypeStruct(columns.shape, x.dtype)] if save_up and gated else []
    return tl.pallas_call(
        functools.partial(_walk_kernel, gated=gated, based=base is not None, few=few),
        name="gated_ffn_walk",
        grid=(x.shape[0],),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(x.shape[:1], jnp.float32),
            *saved,
        ],
        num_warps=warps,
        num_stages=1,
    )(limit, count, nnz, columns, values, x, up, down, *([] if base is None else [base]))
