"""TwELL, row lists and bit masks against plain NumPy, and as pytrees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import twell
from pallas_kernels.twell import RowList, TwELL


def sparse(shape, density, seed=0):
    rng = np.random.default_rng(seed)
    dense = np.where(rng.random(shape) < density, rng.standard_normal(shape), 0.0)
    return jnp.asarray(dense, jnp.bfloat16)


def expected_dense(dense, tile, slots):
    """The contract, column by column: NaN where a tile holds more than it has slots for."""
    out = np.array(dense.astype(jnp.float32))
    for start in range(0, out.shape[-1], tile):
        part = out[..., start : start + tile]
        part[(part != 0).sum(-1) > slots] = np.nan
    return out


@pytest.mark.parametrize(
    ("columns", "tile", "compression", "density"),
    [(96, 32, 8, 0.05), (97, 32, 4, 0.2), (64, 64, 1, 1.0), (130, 64, 8, 0.5), (1, 32, 8, 1.0)],
)
def test_round_trip_and_overflow(columns, tile, compression, density):
    dense = sparse((3, 5, columns), density)
    matrix = TwELL.from_dense(dense, tile=tile, compression=compression)
    matrix.validate()
    expected = expected_dense(dense, tile, tile // compression)
    np.testing.assert_array_equal(np.array(matrix.to_dense().astype(jnp.float32)), expected)
    counts = [(np.array(dense) != 0)[..., s : s + tile].sum(-1) for s in range(0, columns, tile)]
    np.testing.assert_array_equal(np.array(matrix.counts), np.stack(counts, -1))
    lost = np.isnan(expected).reshape(-1, columns).any(0)
    overflowed = np.array(matrix.overflowed()).reshape(-1, matrix.counts.shape[-1]).any(0)
    np.testing.assert_array_equal(np.repeat(overflowed, tile)[:columns], lost)


def test_entry_layout_is_value_high_column_low():
    dense = jnp.zeros((1, 64), jnp.bfloat16).at[0, 40].set(1.5)
    matrix = TwELL.from_dense(dense, tile=32, compression=8)
    assert int(matrix.entries[0, 1, 0]) == (0x3FC0 << 16) | 40
    assert matrix.slots == 4


def test_nan_and_infinity_are_kept():
    ends = jnp.array([jnp.nan, -jnp.inf], jnp.bfloat16)
    dense = jnp.zeros((1, 32), jnp.bfloat16).at[0, :2].set(ends)
    out = np.array(TwELL.from_dense(dense, tile=32).to_dense().astype(jnp.float32))
    assert np.isnan(out[0, 0])
    assert out[0, 1] == -np.inf
    assert (out[0, 2:] == 0).all()


def test_survives_jit_vmap_scan_and_donation():
    dense = sparse((4, 6, 96), 0.1)
    eager = TwELL.from_dense(dense, tile=32, compression=2)
    jitted = jax.jit(lambda d: TwELL.from_dense(d, tile=32, compression=2))(dense)
    mapped = jax.vmap(lambda d: TwELL.from_dense(d, tile=32, compression=2))(dense)
    _, scanned = jax.lax.scan(
        lambda c, d: (c, TwELL.from_dense(d, tile=32, compression=2)), 0, dense
    )
    for other in (jitted, mapped, scanned):
        assert (other.columns, other.tile) == (96, 32)
        np.testing.assert_array_equal(np.array(other.entries), np.array(eager.entries))
        np.testing.assert_array_equal(np.array(other.counts), np.array(eager.counts))
    backward = jax.vmap(TwELL.to_dense)(mapped)
    np.testing.assert_array_equal(np.array(backward), np.array(dense))
    double = jax.jit(lambda t: jax.tree.map(lambda a: a + 0, t), donate_argnums=0)
    kept = double(mapped)
    assert mapped.entries.is_deleted()
    np.testing.assert_array_equal(np.array(kept.to_dense()), np.array(dense))


def test_row_list_round_trip_and_overflow():
    dense = sparse((2, 4, 70), 0.2).at[1, 2].set(1.0).at[0, 0].set(0.0)
    rows = RowList.from_dense(dense, width=32)
    rows.validate()
    expected = np.array(dense.astype(jnp.float32))
    expected[1, 2] = np.nan
    np.testing.assert_array_equal(np.array(rows.to_dense().astype(jnp.float32)), expected)
    assert np.argwhere(np.array(rows.overflowed())).tolist() == [[1, 2]]
    assert int(rows.counts[1, 2]) == 70
    mapped = jax.jit(jax.vmap(lambda d: RowList.from_dense(d, width=32)))(dense)
    np.testing.assert_array_equal(np.array(mapped.columns), np.array(rows.columns))


@pytest.mark.parametrize("columns", [1, 32, 33, 100])
def test_bit_mask_round_trip(columns):
    active = np.random.default_rng(1).random((3, columns)) < 0.3
    words = np.array(twell.pack_bits(jnp.asarray(active)))
    for row, column in np.argwhere(active):
        assert words[row, column // 32] >> (column % 32) & 1
    assert sum(int(w).bit_count() for w in words.ravel()) == active.sum()
    np.testing.assert_array_equal(np.array(twell.unpack_bits(jnp.asarray(words), columns)), active)


def test_validate_names_the_broken_invariant():
    good = TwELL.from_dense(sparse((2, 64), 0.2), tile=32, compression=2)
    good.validate()
    bad_count = dataclasses.replace(good, counts=good.counts.at[0, 0].set(33))
    with pytest.raises(ValueError, match="exceeds its tile"):
        bad_count.validate()
    swapped = dataclasses.replace(good, entries=good.entries[..., ::-1])
    with pytest.raises(ValueError, match=r"outside its tile|ascending"):
        swapped.validate()
    with pytest.raises(ValueError, match="uint32"):
        dataclasses.replace(good, entries=good.entries.astype(jnp.int32)).validate()
    with pytest.raises(ValueError, match="for 64 columns"):
        dataclasses.replace(good, counts=good.counts[:, :1]).validate()
    rows = RowList.from_dense(sparse((2, 64), 0.5), width=40)
    with pytest.raises(ValueError, match="ascending"):
        dataclasses.replace(rows, columns=rows.columns[:, ::-1]).validate()


def test_callers_mistakes_are_named():
    with pytest.raises(ValueError, match="multiple of compression"):
        TwELL.from_dense(jnp.zeros((1, 64)), tile=100, compression=8)
    with pytest.raises(ValueError, match="at most 65536 columns, got 65537"):
        TwELL.from_dense(jnp.zeros((1, 65537)))
