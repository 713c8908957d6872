"""Matmul whose epilogue emits the sparse matrix, directly or through a bit mask and values.

"direct": the epilogue turns its tile into TwELL entries. A column's slot is a popcount of the mask
words before it, so no scan over columns is needed, but every entry goes to a computed address and
the compiler moves 64-bit addresses through shared memory: a tile of 128 x 256 does not fit, and
smaller ones are slow.

"bits": the epilogue writes the bit mask of active columns and, at the active columns only, values
into a dense-shaped buffer (written bytes follow the active columns). A second kernel, one program
per row, expands them into tiles.

Measured on one H200, jax 0.11.2, bf16, 16,384 x 2048 times 5632 x 2048, 30 active per row: XLA's
matmul without any epilogue 0.48 ms; "bits" 0.58 + 0.06; "direct" 0.82 (64 x 256 tile) and 0.84
(128 x 128).

Numerics: the pre-activation and its bias stay float32 until the sign test and round to bfloat16
once, on store.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton as tl
from pallas_kernels import dispatch
from pallas_kernels.pack_matmul.config import PackConfig
from pallas_kernels.tuning import MatmulTile


def unsupported(x: Array, w: Array, tile: int, config: PackConfig) -> str | None:
    """Why the engine cannot run this call, or None if it can. Static: shapes, dtypes, platform."""
    loose = tl.partitioned_axes()
    if loose:
        return f"mesh axes {loose} are not manual here: put the call inside jax.shard_map"
    if not dispatch.interpreting() and not tl.on_cuda():
        return "it needs a CUDA device (or `with pallas_kernels.interpret():` in tests)"
    if str(x.dtype) not in ("bfloat16", "float32"):
        return f"dtype {x.dtype} is not one of bfloat16, float32"
    if x.shape[-1] % 16:
        return f"D must be a multiple of 16, got {x.shape[-1]}"
    if x.size == 0 or w.size == 0:
        return f"empty operand: x {list(x.shape)}, w {list(w.shape)}"
    if tile % 32 or tile & (tile - 1):
        return f"tile must be a power of two >= 32, got {tile}"
    if config.method == "direct" and tile > 256:
        return f'method "direct" holds one tile of columns per program, at most 256, got {tile}'
    return None


def _entry(value: Array, column: Array) -> Array:
    """One entry as int32 bits: bfloat16 value in the high half, column in the low half."""
    high = lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.int16).astype(jnp.int32)
    return (high << 16) | column


def _pre_activation_tile(x_ref, w_ref, bias_ref, tile, depth):
    """This program's tile: (rows, columns, live rows or None, column tile, pre, active)."""
    (tokens, width), features = x_ref.shape, w_ref.shape[0]
    row_tiles, column_tiles = pl.cdiv(tokens, tile.rows), pl.cdiv(features, tile.columns)
    index = pl.program_id(0)
    first = index // (tile.group * column_tiles) * tile.group
    height = jnp.minimum(row_tiles - first, tile.group)
    within = index % (tile.group * column_tiles)
    row = (first + within % height) * tile.rows + lax.broadcasted_iota(jnp.int32, (tile.rows,), 0)
    column_tile = within // height
    column = lax.broadcasted_iota(jnp.int32, (tile.columns,), 0) + column_tile * tile.columns
    rows = jnp.minimum(row, tokens - 1) if tokens % tile.rows else row
    neurons = jnp.minimum(column, features - 1) if features % tile.columns else column

    def step(k, acc):
        a = x_ref[rows, pl.ds(k * depth, depth)]
        return acc + tl.dot(a, w_ref[neurons, pl.ds(k * depth, depth)], trans_b=True)

    pre = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    pre = lax.fori_loop(0, width // depth, step, pre)
    if bias_ref is not None:
        pre += bias_ref[neurons].astype(jnp.float32)[None, :]
    active = tl.is_active(pre)
    if features % tile.columns:
        active = active & (column < features)[None, :]
    live = row < tokens if tokens % tile.rows else None
    return row, column, live, column_tile, pre, active


def _bits_kernel(*refs, biased, tile, depth):
    words_ref, values_ref = refs[-2:]
    row, column, live, column_tile, pre, active = _pre_activation_tile(
        refs[0], refs[1], refs[2] if biased else None, tile, depth
    )
    words = tile.columns // 32
    word = column_tile * words + lax.broadcasted_iota(jnp.int32, (words,), 0)
    inside = (word < words_ref.shape[1])[None, :]
    mask = active
    if live is not None:
        inside, mask = inside & live[:, None], mask & live[:, None]
    tl.store(words_ref.at[row[:, None], word[None, :]], tl.pack_bits(active), mask=inside)
    here = values_ref.at[row[:, None], column[None, :]]
    tl.store(here, pre.astype(values_ref.dtype), mask=mask)


def _direct_kernel(*refs, biased, tile, depth, slots):
    entries_ref, counts_ref = refs[-2:]
    row, column, live, column_tile, pre, active = _pre_activation_tile(
        refs[0], refs[1], refs[2] if biased else None, tile, depth
    )
    words = tl.pack_bits(active)
    counts = lax.population_count(words)
    before = lax.cumsum(counts, axis=1) - counts
    lane = lax.broadcasted_iota(jnp.int32, (tile.rows, tile.columns // 32, 32), 2)
    below = words[:, :, None] & ((jnp.int32(1) << lane) - 1)
    position = before[:, :, None] + lax.population_count(below)
    position = position.reshape(tile.rows, tile.columns)
    mask = active & (position < slots)
    if live is not None:
        mask = mask & live[:, None]
    # A masked-out lane gets a slot of its own behind the row's entries.
    spare = entries_ref.shape[1] - tile.columns
    own = spare + lax.broadcasted_iota(jnp.int32, (tile.rows, tile.columns), 1)
    slot = jnp.where(mask, column_tile * slots + position, own)
    here = entries_ref.at[row[:, None], slot]
    tl.store(here, _entry(pre, column[None, :]), mask=mask)
    tl.store(counts_ref.at[row, column_tile], jnp.sum(counts, axis=1), mask=live)


def _expand_kernel(words_ref, values_ref, entries_ref, counts_ref, *, tile, slots):
    token = pl.program_id(0)
    tiles, words_per_tile = counts_ref.shape[1], tile // 32
    shape = (pl.next_power_of_2(tiles), words_per_tile)
    at = lax.broadcasted_iota(jnp.int32, shape, 0)
    word = at * words_per_tile + lax.broadcasted_iota(jnp.int32, shape, 1)
    words = tl.load(words_ref.at[token, word], mask=word < words_ref.shape[1], other=0)
    counts = lax.population_count(words)
    position = lax.cumsum(counts, axis=1) - counts
    which = lax.broadcasted_iota(jnp.int32, shape[:1], 0)
    tl.store(counts_ref.at[token, which], jnp.sum(counts, axis=1), mask=which < tiles)

    def emit(_, carry):
        words, position = carry
        live = jnp.logical_and(words != 0, position < slots)
        slot = jnp.where(live, at * slots + position, tiles * slots + word)
        column = 32 * word + tl.lowest_bit(words)
        value = tl.load(values_ref.at[token, column], mask=live, other=0.0)
        tl.store(entries_ref.at[token, slot], _entry(value, column), mask=live)
        return words & (words - 1), position + 1

    lax.fori_loop(0, jnp.max(counts), emit, (words, position))


def bits(x: Array, w: Array, bias: Array | None, tile: MatmulTile) -> list[Array]:
    """Bit mask (M, ceil(F / 32)) int32; values (M, F) bfloat16, unspecified where not active."""
    (tokens, width), features = x.shape, w.shape[0]
    depth = min(tile.depth, width & -width)
    return tl.pallas_call(
        functools.partial(_bits_kernel, biased=bias is not None, tile=tile, depth=depth),
        name="pack_matmul_bits",
        grid=(pl.cdiv(tokens, tile.rows) * pl.cdiv(features, tile.columns),),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, pl.cdiv(features, 32)), jnp.int32),
            jax.ShapeDtypeStruct((tokens, features), jnp.bfloat16),
        ],
        num_warps=tile.warps,
        num_stages=tile.stages,
    )(x, w, *([] if bias is None else [bias]))


def expand(words: Array, values: Array, *, tile: int, slots: int) -> list[Array]:
    """Entries (M, tiles * slots + spare) int32 and counts (M, tiles) from `bits`' outputs."""
    tokens, features = values.shape
    tiles = pl.cdiv(features, tile)
    spare = pl.next_power_of_2(tiles) * (tile // 32)
    return tl.pallas_call(
        functools.partial(_expand_kernel, tile=tile, slots=slots),
        name="pack_matmul_expand",
        grid=(tokens,),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, tiles * slots + spare), jnp.int32),
            jax.ShapeDtypeStruct((tokens, tiles), jnp.int32),
        ],
        num_warps=1 if spare <= 512 else 4,
        num_stages=1,
    )(words, values)


def direct(x: Array, w: Array, bias: Array | None, tile: MatmulTile, slots: int) -> list[Array]:
    """Entries (M, tiles * slots + spare) int32 and counts (M, tiles) in one kernel."""
    (tokens, width), features = x.shape, w.shape[0]
    tiles = pl.cdiv(features, tile.columns)
    depth = min(tile.depth, width & -width)
    return tl.pallas_call(
        functools.partial(
            _direct_kernel, biased=bias is not None, tile=tile, depth=depth, slots=slots
        ),
        name="pack_matmul_direct",
        grid=(pl.cdiv(tokens, tile.rows) * tiles,),
        out_shape=[
            jax.ShapeDtypeStruct((tokens, tiles * slots + tile.columns), jnp.int32),
            jax.ShapeDtypeStruct((tokens, tiles), jnp.int32),
        ],
        num_warps=tile.warps,
        num_stages=tile.stages,
    )(x, w, *([] if bias is None else [bias]))
