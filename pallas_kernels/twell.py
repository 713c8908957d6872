"""Sparse activation formats: TwELL (tiled ELL with a tile's slots in place), row lists, bit masks.

TwELL cuts a row of F columns into tiles of T columns and gives each tile T / C slots of one uint32:
the bfloat16 value in the high half, the column (counted from the row's start) in the low half. A
matmul that owns a tile of the output can therefore write its part of the sparse matrix from its
epilogue, without knowing what the other tiles hold. Counts lie apart and are never clamped, so a
tile with more active columns than slots shows as `counts > slots`; `to_dense` answers NaN there,
never a silently truncated row. Columns are 16 bits wide: F is at most 65,536.

Source: the format of arXiv 2603.23198, with the counts moved out of the first slot.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

MAX_COLUMNS = 1 << 16


def pack_bits(active: Array) -> Array:
    """Booleans (..., F) as uint32 words (..., ceil(F / 32)): bit j of word w is 32 w + j."""
    columns = active.shape[-1]
    words = -(-columns // 32)
    padding = [(0, 0)] * (active.ndim - 1) + [(0, words * 32 - columns)]
    bits = jnp.pad(active.astype(jnp.uint32), padding).reshape(*active.shape[:-1], words, 32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def unpack_bits(words: Array, columns: int) -> Array:
    """Booleans (..., columns) from the words of `pack_bits`."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :columns].astype(bool)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TwELL:
    """A sparse matrix (..., columns) in tiles; a pytree whose leading dimensions may be mapped.

    Invariants (`validate` checks them): slots in use come first and hold ascending columns of their
    own tile; `counts` is the true number of active columns, also where it exceeds the slots. Slots
    past the count hold unspecified bits.

    Attributes:
      entries: (..., tiles, slots) uint32, bfloat16 value << 16 | column.
      counts: (..., tiles) int32, active columns of each tile, never clamped.
      columns: F, static.
      tile: T, columns of one tile, static.
    """

    entries: Array
    counts: Array
    columns: int = dataclasses.field(metadata={"static": True})
    tile: int = dataclasses.field(metadata={"static": True})

    @property
    def slots(self) -> int:
        """Entries that one tile can hold, T / C."""
        return self.entries.shape[-1]

    @classmethod
    def from_dense(cls, dense: Array, *, tile: int = 256, compression: int = 8) -> TwELL:
        """Keeps the first T / C non-zeros of each tile of `dense` (..., F), rounded to bfloat16.

        Args:
          dense: (..., F) floating point; a NaN is not zero and is kept.
          tile: T, columns of one tile; a multiple of `compression`.
          compression: C, how many columns share one slot.

        Returns:
          The TwELL matrix; tiles with more non-zeros than slots are `overflowed`.

        Raises:
          ValueError: tile or compression do not fit, or F exceeds 65,536.
        """
        columns = dense.shape[-1]
        slots = slots_of(columns, tile, compression)
        tiles = -(-columns // tile)
        padding = [(0, 0)] * (dense.ndim - 1) + [(0, tiles * tile - columns)]
        tiled = jnp.pad(dense.astype(jnp.bfloat16), padding)
        tiled = tiled.reshape(*dense.shape[:-1], tiles, tile)
        active = tiled != 0
        # A stable sort brings the active columns to the front and keeps their order.
        order = jnp.argsort(jnp.logical_not(active), axis=-1, stable=True)[..., :slots]
        values = jnp.take_along_axis(tiled, order, axis=-1)
        column = order + tile * jnp.arange(tiles, dtype=order.dtype)[:, None]
        used = jnp.take_along_axis(active, order, axis=-1)
        entries = jnp.where(used, encode(values, column), jnp.uint32(0))
        return cls(entries, jnp.sum(active, axis=-1, dtype=jnp.int32), columns, tile)

    def overflowed(self) -> Array:
        """(..., tiles) bool: tiles with more active columns than slots; the rest is not stored."""
        return self.counts > self.slots

    def to_dense(self) -> Array:
        """(..., F) bfloat16; all columns of an overflowed tile are NaN, because some were lost."""
        lead = self.counts.shape[:-1]
        rows = int(np.prod(lead, dtype=np.int64))
        value, column = decode(self.entries)
        used = jnp.arange(self.slots, dtype=jnp.int32) < self.counts[..., None]
        column = jnp.where(used, column, self.columns).reshape(rows, -1)
        dense = jnp.zeros((rows, self.columns), jnp.bfloat16)
        dense = dense.at[jnp.arange(rows)[:, None], column].set(
            value.reshape(rows, -1), mode="drop"
        )
        lost = jnp.repeat(self.overflowed(), self.tile, axis=-1)[..., : self.columns]
        return jnp.where(lost, jnp.bfloat16(jnp.nan), dense.reshape(*lead, self.columns))

    def validate(self) -> None:
        """Raises ValueError with the first broken invariant; for tests, needs concrete arrays."""
        tiles = -(-self.columns // self.tile)
        if self.entries.dtype != jnp.uint32 or self.counts.dtype != jnp.int32:
            raise ValueError(
                "TwELL: entries must be uint32 and counts int32, got "
                f"{self.entries.dtype} and {self.counts.dtype}"
            )
        if self.counts.shape[-1] != tiles or self.entries.shape[:-1] != self.counts.shape:
            raise ValueError(
                f"TwELL: expected entries (..., {tiles}, slots) and counts (..., {tiles}) for "
                f"{self.columns} columns in tiles of {self.tile}, got {self.entries.shape} and "
                f"{self.counts.shape}"
            )
        counts = np.asarray(self.counts)
        size = np.minimum(self.tile, self.columns - self.tile * np.arange(tiles))
        if (counts < 0).any() or (counts > size).any():
            raise ValueError("TwELL: a count is negative or exceeds its tile's number of columns")
        column = (np.asarray(self.entries) & 0xFFFF).astype(np.int64)
        used = np.arange(self.slots) < counts[..., None]
        first = self.tile * np.arange(tiles)[:, None]
        inside = (column >= first) & (column < first + size[:, None])
        if (used & ~inside).any():
            raise ValueError("TwELL: an entry's column lies outside its tile")
        if (used[..., 1:] & (np.diff(column, axis=-1) <= 0)).any():
            raise ValueError("TwELL: columns of a tile are not strictly ascending")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowList:
    """A sparse matrix (..., F) as one list per row; a pytree, leading dimensions may be mapped.

    Attributes:
      columns: (..., width) int32, active columns in ascending order; unspecified past the count.
      values: (..., width), the values at those columns.
      counts: (...) int32, active columns of each row, never clamped.
      features: F, static.
    """

    columns: Array
    values: Array
    counts: Array
    features: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_dense(cls, dense: Array, *, width: int) -> RowList:
        """Keeps the first `width` non-zeros of each row of `dense` (..., F), in its dtype."""
        active = dense != 0
        order = jnp.argsort(jnp.logical_not(active), axis=-1, stable=True)[..., :width]
        values = jnp.take_along_axis(dense, order, axis=-1)
        counts = jnp.sum(active, axis=-1, dtype=jnp.int32)
        return cls(order.astype(jnp.int32), values, counts, dense.shape[-1])

    def overflowed(self) -> Array:
        """(...) bool: rows with more active columns than the list is wide."""
        return self.counts > self.columns.shape[-1]

    def to_dense(self) -> Array:
        """(..., F) in the values' dtype; an overflowed row is NaN, because entries were lost."""
        lead, width = self.counts.shape, self.columns.shape[-1]
        rows = int(np.prod(lead, dtype=np.int64))
        used = jnp.arange(width, dtype=jnp.int32) < self.counts[..., None]
        column = jnp.where(used, self.columns, self.features).reshape(rows, width)
        dense = jnp.zeros((rows, self.features), self.values.dtype)
        dense = dense.at[jnp.arange(rows)[:, None], column].set(
            self.values.reshape(rows, width), mode="drop"
        )
        nan = jnp.array(jnp.nan, self.values.dtype)
        return jnp.where(self.overflowed()[..., None], nan, dense.reshape(*lead, self.features))

    def validate(self) -> None:
        """Raises ValueError with the first broken invariant; for tests, needs concrete arrays."""
        counts, column = np.asarray(self.counts), np.asarray(self.columns)
        if column.shape != self.values.shape or column.shape[:-1] != counts.shape:
            raise ValueError(
                "RowList: columns and values must be (..., width) and counts (...), got "
                f"{column.shape}, {self.values.shape} and {counts.shape}"
            )
        if (counts < 0).any() or (counts > self.features).any():
            raise ValueError(f"RowList: a count lies outside 0..{self.features}")
        used = np.arange(column.shape[-1]) < counts[..., None]
        if (used & ((column < 0) | (column >= self.features))).any():
            raise ValueError(f"RowList: a column lies outside 0..{self.features - 1}")
        if (used[..., 1:] & (np.diff(column, axis=-1) <= 0)).any():
            raise ValueError("RowList: columns of a row are not strictly ascending")


def slots_of(columns: int, tile: int, compression: int) -> int:
    """Slots per tile, T / C; raises ValueError where the three do not fit together."""
    if compression < 1 or tile < 1 or tile % compression:
        raise ValueError(
            f"TwELL: tile must be a positive multiple of compression, got tile={tile} and "
            f"compression={compression}"
        )
    if columns > MAX_COLUMNS:
        raise ValueError(
            f"TwELL: columns are 16 bits wide, so at most {MAX_COLUMNS} columns, got {columns}; "
            "split the matrix, or use RowList"
        )
    return tile // compression


def encode(values: Array, columns: Array) -> Array:
    """uint32 entries: bfloat16 value in the high half, column in the low half."""
    high = lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    return (high << 16) | columns.astype(jnp.uint32)


def decode(entries: Array) -> tuple[Array, Array]:
    """(bfloat16 values, int32 columns) of uint32 entries."""
    values = lax.bitcast_convert_type((entries >> 16).astype(jnp.uint16), jnp.bfloat16)
    return values, (entries & jnp.uint32(0xFFFF)).astype(jnp.int32)
