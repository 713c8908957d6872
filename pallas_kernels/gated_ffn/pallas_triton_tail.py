"""Dense tail: tensor-core matmuls over the rows that are too long to walk, 0 to all of them.

How many rows there are is known on the device only. The three kernels are persistent: a fixed
number of programs shares work whose amount they read from device memory, so an empty tail costs
three launches that return at once and no value travels to the host, where a `lax.cond` would wait
18 us for one. Rows are gathered by number on load and scattered on store.

A tile of 128 x 256 waits for the whole depth of a matmul however few rows it has: 0.65 us per 64,
so 80 us for one long row at D = 2048, F = 5632, and the first token of every sequence is such a
row. Few rows (pallas_triton_long_rows.py) take small tiles of a wide depth, which spread over all
programs.

The product with the pre-activations, l1 and nnz have a kernel of their own between the matmuls. In
the up matmul's epilogue they cost more than the pass over memory that it saves: that kernel took
0.80 ms with them and 0.66 without the two sums (16,384 rows, D = 2048, F = 5632, one H200), where
the matmul itself needs 0.5, and carrying the tile as two halves to spare registers did not help.

Numerics: products accumulate in float32; u = x up^T and h round to x's dtype, as in the dense
engine; l1 adds unrounded h. Order of summation is fixed.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton as tl
from pallas_kernels.gated_ffn import pallas_triton_long_rows as long_rows
from pallas_kernels.gated_ffn.pallas_triton_long_rows import LongRows
from pallas_kernels.tuning import MatmulTile

_ROW_PROGRAMS = 8  # programs of the elementwise kernel per multiprocessor
_ROW_CHUNK = 2048


def _place():
    """(this program, programs); interpret mode reads them outside of conditions only."""
    return pl.program_id(0), pl.num_programs(0)


def _my_share(place, total, body):
    """Calls body(i) for this program's share of 0 .. total - 1."""
    program, programs = place

    def step(i, carry):
        body(program + i * programs)
        return carry

    lax.fori_loop(0, (total - program + programs - 1) // programs, step, 0)


def _for_each_tile(place, count, rows, column_tiles, group, tile):
    """Calls tile(row_tile, column_tile) for this program's share, `group` row tiles together."""
    row_tiles = (count + rows - 1) // rows

    def one(index):
        first = index // (group * column_tiles) * group
        height = jnp.minimum(row_tiles - first, group)
        within = index % (group * column_tiles)
        tile(first + within % height, within // height)

    _my_share(place, row_tiles * column_tiles, one)


def _few_tile(tile: MatmulTile, columns: int) -> MatmulTile:
    # Under 64 rows, so that a dot is no warp-group one: those went wrong with masked rows. No more
    # shared memory than the large tile, which fits the device.
    few = dataclasses.replace(tile, rows=32, columns=columns, depth=256, group=1)
    while few.depth > 16 and few.shared_memory(2) > tile.shared_memory(2):
        few = dataclasses.replace(few, depth=few.depth // 2)
    return few


def _by_number_of_rows(count, few, tile, few_columns, run):
    """Calls run(tile), with small tiles where there are few rows."""
    if not few:
        return run(tile)

    @pl.when(count > few)
    def _many():
        run(tile)

    @pl.when(count <= few)
    def _few():
        run(_few_tile(tile, few_columns))


def _up_kernel(count_ref, rows_ref, short_ref, x_ref, up_ref, u_ref, *, tile, few):
    """u[slot] = x[row of slot] up^T."""
    place, counts = _place(), (count_ref[0], count_ref[1])
    count = long_rows.number(counts, few)
    features, padded, width = up_ref.shape[0], u_ref.shape[1], x_ref.shape[1]

    def run(tile):
        depth = min(tile.depth, width & -width)

        def one(row_tile, column_tile):
            slot = row_tile * tile.rows + lax.broadcasted_iota(jnp.int32, (tile.rows,), 0)
            live = slot < count
            rows = long_rows.row_at(counts, rows_ref, short_ref, slot, live, 0)
            lane = lax.broadcasted_iota(jnp.int32, (tile.columns,), 0)
            column = column_tile * tile.columns + lane
            beyond = pl.cdiv(padded, tile.columns) * tile.columns > features
            neuron = jnp.minimum(column, features - 1) if beyond else column

            def step(k, acc):
                a, b = (
                    ref[index, pl.ds(k * depth, depth)]
                    for ref, index in ((x_ref, rows), (up_ref, neuron))
                )
                return acc + tl.dot(a, b, trans_b=True)

            zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
            u = lax.fori_loop(0, width // depth, step, zeros)
            mask = live[:, None] & (column < padded)[None, :]
            here = u_ref.at[slot[:, None], column[None, :]]
            tl.store(here, u.astype(u_ref.dtype), mask=mask)

        _for_each_tile(place, count, tile.rows, pl.cdiv(padded, tile.columns), tile.group, one)

    _by_number_of_rows(count, few, tile, 64, run)


def _biased(pre_ref, bias_ref, row, column, mask):
    """pre[row, column] + bias[column] in float32 after it rounded; -1 outside the mask."""
    pre = tl.load(pre_ref.at[row, column], mask=mask, other=-1.0)
    bias = None if bias_ref is None else tl.load(bias_ref.at[column], mask=mask, other=0.0)
    return tl.add_bias(pre, bias).astype(jnp.float32)


def _hidden_kernel(count_ref, rows_ref, short_ref, pre_ref, *refs, gated, biased, few):
    """h[slot] = relu(pre[row of slot] + bias) * u[slot] in u's place; l1 and nnz of the row."""
    place, counts = _place(), (count_ref[0], count_ref[1])
    bias_ref = refs[0] if biased else None
    l1_ref, nnz_ref, h_ref = refs[-3:]
    features, padded = pre_ref.shape[1], h_ref.shape[1]
    chunk = min(_ROW_CHUNK, max(32, pl.next_power_of_2(padded)))

    def one(slot):
        row = long_rows.row_at(counts, rows_ref, short_ref, slot, slot >= 0, 0)

        def step(k, carry):
            l1, nnz = carry
            column = k * chunk + lax.broadcasted_iota(jnp.int32, (chunk,), 0)
            mask = column < features
            pre = _biased(pre_ref, bias_ref, row, column, mask)
            active = tl.is_active(pre)
            h = pre
            if gated:
                u = tl.load(h_ref.at[slot, column], mask=mask, other=0.0)
                h = pre * u.astype(jnp.float32)
            h = jnp.where(active, h, 0.0)
            tl.store(h_ref.at[slot, column], h.astype(h_ref.dtype), mask=column < padded)
            return l1 + jnp.sum(jnp.abs(h)), nnz + jnp.sum(active.astype(jnp.int32))

        start = (jnp.float32(0), jnp.int32(0))
        l1_ref[row], nnz_ref[row] = lax.fori_loop(0, pl.cdiv(padded, chunk), step, start)

    _my_share(place, long_rows.number(counts, few), one)


def _down_kernel(count_ref, rows_ref, short_ref, h_ref, down_ref, _y, y_ref, *, tile, few):
    """y[row of slot] = h[slot] down."""
    place, counts = _place(), (count_ref[0], count_ref[1])
    count = long_rows.number(counts, few)
    tokens = y_ref.shape[0]
    features, width = down_ref.shape
    padded = h_ref.shape[1]

    def run(tile):
        columns = min(tile.columns, width & -width)
        depth = min(tile.depth, padded & -padded)

        def one(row_tile, column_tile):
            slot = row_tile * tile.rows + lax.broadcasted_iota(jnp.int32, (tile.rows,), 0)
            live = slot < count
            safe = jnp.where(live, slot, 0)
            # Lanes past the end get an index of their own, out of bounds, never a live row's.
            rows = long_rows.row_at(counts, rows_ref, short_ref, slot, live, tokens)

            def step(k, acc):
                neuron = k * depth + lax.broadcasted_iota(jnp.int32, (depth,), 0)
                if padded != features:  # h is zero there
                    neuron = jnp.minimum(neuron, features - 1)
                a = h_ref[safe, pl.ds(k * depth, depth)]
                return acc + tl.dot(a, down_ref[neuron, pl.ds(column_tile * columns, columns)])

            zeros = jnp.zeros((tile.rows, columns), jnp.float32)
            y = lax.fori_loop(0, padded // depth, step, zeros)
            column = column_tile * columns + lax.broadcasted_iota(jnp.int32, (columns,), 0)
            here = y_ref.at[rows[:, None], column[None, :]]
            tl.store(here, y.astype(y_ref.dtype), mask=live[:, None])

        _for_each_tile(place, count, tile.rows, width // columns, tile.group, one)

    _by_number_of_rows(count, few, tile, 32, run)


def _product_kernel(pre_ref, *refs, gated, biased):
    bias_ref = refs[0] if biased else None
    up_ref = refs[biased] if gated else None
    h_ref, l1_ref, nnz_ref = refs[-3:]
    row, features = pl.program_id(0), pre_ref.shape[1]
    chunk = min(_ROW_CHUNK, max(32, pl.next_power_of_2(features)))

    def step(k, carry):
        l1, nnz = carry
        column = k * chunk + lax.broadcasted_iota(jnp.int32, (chunk,), 0)
        mask = column < features
        pre = _biased(pre_ref, bias_ref, row, column, mask)
        active = tl.is_active(pre)
        h = pre
        if up_ref is not None:
            h *= tl.load(up_ref.at[row, column], mask=mask, other=0.0).astype(jnp.float32)
        h = jnp.where(active, h, 0.0)
        tl.store(h_ref.at[row, column], h.astype(h_ref.dtype), mask=mask)
        return l1 + jnp.sum(jnp.abs(h)), nnz + jnp.sum(active.astype(jnp.int32))

    start = (jnp.float32(0), jnp.int32(0))
    l1_ref[row], nnz_ref[row] = lax.fori_loop(0, pl.cdiv(features, chunk), step, start)


def product(pre: Array, bias: Array | None, up_out: Array | None) -> list[Array]:
    """h = relu(pre + bias) * up_out (M, F) like pre, l1 and nnz (M,), in one pass over memory.

    XLA makes h in one pass and the two sums in a second (77 + 125 us at 16,384 x 5,632, one H200).
    """
    row = pre.shape[:1]
    return tl.pallas_call(
        functools.partial(_product_kernel, gated=up_out is not None, biased=bias is not None),
        name="gated_ffn_product",
        grid=row,
        out_shape=[
            jax.ShapeDtypeStruct(pre.shape, pre.dtype),
            jax.ShapeDtypeStruct(row, jnp.float32),
            jax.ShapeDtypeStruct(row, jnp.int32),
        ],
        num_warps=4,
        num_stages=1,
    )(pre, *(a for a in (bias, up_out) if a is not None))


def tail(
    long: LongRows,
    x: Array,
    pre: Array,
    bias: Array | None,
    up: Array,
    down: Array,
    y: Array,
    l1: Array,
    nnz: Array,
    *,
    gated: bool,
    up_tile: MatmulTile,
    down_tile: MatmulTile,
    programs: int,
) -> list[Array]:
    """Writes y, l1 and nnz of the long rows into the given arrays (in place); the rest is kept."""
    tokens, few = x.shape[0], long_rows.few_rows(x.dtype)
    padded = pl.cdiv(pre.shape[1], down_tile.depth) * down_tile.depth
    hidden = jax.ShapeDtypeStruct((tokens, padded), x.dtype)
    products = []
    if gated:
        products = tl.pallas_call(
            functools.partial(_up_kernel, tile=up_tile, few=few),
            name="gated_ffn_tail_up",
            grid=(programs,),
            out_shape=[hidden],
            num_warps=up_tile.warps,
            num_stages=up_tile.stages,
        )(*long, x, up)
    inputs = [*long, pre, *([] if bias is None else [bias])]
    first = len(inputs)
    l1, nnz, h = tl.pallas_call(
        functools.partial(_hidden_kernel, gated=gated, biased=bias is not None, few=few),
        name="gated_ffn_tail_hidden",
        grid=(programs * _ROW_PROGRAMS,),
        out_shape=[*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (l1, nnz)), hidden],
        num_warps=4,
        num_stages=1,
        aliases={first + k: k for k in range(3 if gated else 2)},
    )(*inputs, l1, nnz, *products)
    [y] = tl.pallas_call(
        functools.partial(_down_kernel, tile=down_tile, few=few),
        name="gated_ffn_tail_down",
        grid=(programs,),
        out_shape=[jax.ShapeDtypeStruct(y.shape, y.dtype)],
        num_warps=down_tile.warps,
        num_stages=down_tile.stages,
        aliases={5: 0},
    )(*long, h, down, y)
    return [y, l1, nnz]
