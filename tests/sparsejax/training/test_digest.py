"""Digests: a plain reference, every single flipped bit, any sharding, indices beyond 2^32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.training import digest

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "int8", "uint32", "bool"]
ONE_BIT_STORES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def random_array(dtype, shape, seed=0):
    """Arbitrary bits of a type, NaN payloads included."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    itemsize = jnp.dtype(dtype).itemsize
    return rng.integers(0, 256, (*shape, itemsize), np.uint8).view(jnp.dtype(dtype))[..., 0]


def reference(x):
    """The module's formula in Python integers, element by element."""
    mask = 2**32 - 1

    def murmur(h):
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & mask
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & mask
        return h ^ (h >> 16)

    def lowbias(h):
        h = ((h ^ (h >> 16)) * 0x7FEB352D) & mask
        h = ((h ^ (h >> 15)) * 0x846CA68B) & mask
        return h ^ (h >> 16)

    lane0 = lane1 = 0
    words = x.astype(np.uint8) if x.dtype == bool else x.view(ONE_BIT_STORES[x.dtype.itemsize])
    for i, b in enumerate(words.ravel().tolist()):
        hi, lo = 0, i
        lo ^= murmur(hi ^ 0x243F6A88)
        hi ^= lowbias(lo ^ 0x85A308D3)
        lo ^= murmur(hi ^ 0x13198A2E)
        lane0 = (lane0 + murmur(b ^ lo)) & mask
        lane1 = (lane1 + lowbias((b + hi) & mask)) & mask
    return f"{lane0:08x}{lane1:08x}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (2, 3, 4)], ids=str)
def test_formula(dtype, shape):
    x = random_array(dtype, shape)
    assert digest.tree_digests({"x": jnp.asarray(x)}) == {"x": reference(x)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_flipped_bit_changes_both_lanes(dtype):
    x = random_array(dtype, (3, 17), seed=1)
    store = ONE_BIT_STORES[x.dtype.itemsize]
    bits = x.view(store)
    n_bits = 1 if dtype == "bool" else 8 * x.dtype.itemsize
    masks = np.zeros((x.size * n_bits, x.size), store)
    for i in range(x.size * n_bits):
        masks[i, i // n_bits] = 1 << (i % n_bits)
    flipped = (bits[None] ^ masks.reshape(-1, *x.shape)).view(x.dtype)
    # One row per flipped copy: the digest's own function, not a copy of it, over all of them.
    starts = [np.uint32(0)] * x.ndim
    lanes = jax.jit(jax.vmap(lambda a: digest._summary_of_shard(a, x.shape, starts)))
    summaries = np.asarray(lanes(jnp.asarray(flipped)))
    assert summaries.shape == (x.size * n_bits, 3)
    whole = digest.tree_digests([jnp.asarray(x)])["0"]
    assert not (summaries[:, 0] == int(whole[:8], 16)).any()
    assert not (summaries[:, 1] == int(whole[8:], 16)).any()


def test_moved_repeated_and_signed_values_change_it():
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    swapped = x[:, [1, 0, 2, 3, 4, 5]]
    rolled = np.roll(x, 1, axis=0)
    negative_zero = np.where(x == 0, np.float32(-0.0), x)
    nan1 = np.where(x == 5, np.uint32(0x7FC00000).view(np.float32), x)
    nan2 = np.where(x == 5, np.uint32(0x7FC00001).view(np.float32), x)
    variants = [x, swapped, rolled, negative_zero, nan1, nan2, np.zeros_like(x), x.T.copy()]
    found = digest.tree_digests([jnp.asarray(v) for v in variants])
    assert len(set(found.values())) == len(variants)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_any_sharding_gives_the_same_digest(axis_type):
    x = random_array("float32", (16, 24, 3))
    expected = {"x": reference(x)}
    for mesh_shape, specs in {
        (2, 2, 2): [P(), P("a"), P("a", "b"), P(("c", "a"), "b"), P(None, ("a", "b", "c")), P("b")],
        (4, 1, 1): [P("a"), P("b", "a")],
        (1, 1, 1): [P("a")],
    }.items():
        devices = jax.devices()[: np.prod(mesh_shape)]
        mesh = jax.make_mesh(mesh_shape, ("a", "b", "c"), (axis_type,) * 3, devices=devices)
        for spec in specs:
            array = jax.device_put(x, NamedSharding(mesh, spec))
            assert digest.tree_digests({"x": array}) == expected, (mesh_shape, spec)
    with jax.set_mesh(jax.make_mesh((8,), ("z",), (axis_type,))):
        assert digest.tree_digests({"x": jax.device_put(x, jax.devices()[3])}) == expected
        assert digest.tree_digests({"x": array}) == expected


def test_devices_sum_over_their_own_share():
    mesh = jax.make_mesh((8,), ("a",), (AxisType.Auto,))
    x = jax.device_put(np.zeros((64, 32), np.float32), NamedSharding(mesh, P("a")))
    compiled = digest._compiled(mesh, P("a")).lower(x).compile()
    text = compiled.as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text
    # No full-size temporaries either: one fused pass (a shard is 1,024 bytes).
    assert compiled.memory_analysis().temp_size_in_bytes < 1024


def test_keys_are_a_bijection_of_the_64_bit_index():
    rng = np.random.default_rng(0)
    hi = np.concatenate([np.zeros(1000), np.arange(1000), rng.integers(0, 2**32, 1000)])
    lo = np.concatenate([np.arange(1000), np.zeros(1000), rng.integers(0, 2**32, 1000)])
    hi, lo = hi.astype(np.uint32), lo.astype(np.uint32)
    k0, k1 = (np.asarray(k) for k in digest._keys(jnp.asarray(hi), jnp.asarray(lo)))

    def mix(function, x):
        return np.asarray(function(jnp.asarray(x)))

    # Undone round by round: what has an inverse has no two indices with one key.
    back_lo = k0 ^ mix(digest._mix_a, k1 ^ np.uint32(0x13198A2E))
    back_hi = k1 ^ mix(digest._mix_b, back_lo ^ np.uint32(0x85A308D3))
    back_lo = back_lo ^ mix(digest._mix_a, back_hi ^ np.uint32(0x243F6A88))
    np.testing.assert_array_equal(back_hi, hi)
    np.testing.assert_array_equal(back_lo, lo)


@pytest.mark.parametrize("mixer", [digest._mix_a, digest._mix_b])
def test_mixers_are_bijections(mixer):
    # Multiplication by an odd number and x ^ (x >> s) are each invertible; injective on a sample.
    x = np.random.default_rng(0).permutation(2**18).astype(np.uint32) * np.uint32(4093)
    assert len(np.unique(np.asarray(mixer(jnp.asarray(x))))) == 2**18


@pytest.mark.parametrize(
    "shape",
    [(3, 5), (2**16, 2**16), (2**20, 2**16), (2**17, 3, 2**16), (7, 2**31, 2), (2**32, 2**31)],
    ids=str,
)
def test_element_numbers_do_not_repeat_beyond_32_bits(shape):
    """Blocks of arrays too large to exist, against Python's integers."""
    rng = np.random.default_rng(0)
    block = tuple(min(n, 3) for n in shape)
    split = digest._split_axis(shape)
    low_size = int(np.prod(shape[split:], dtype=object))
    assert low_size <= 2**32
    corners = [[0] * len(shape), [n - b for n, b in zip(shape, block, strict=True)]]
    corners += [[int(rng.integers(0, n - b + 1)) for n, b in zip(shape, block, strict=True)]]
    seen = {}
    for corner in corners:
        hi, lo = digest._index(block, shape, [jnp.uint32(c) for c in corner])
        for place in np.ndindex(*block):
            at = [c + p for c, p in zip(corner, place, strict=True)]
            number = 0
            for n, i in zip(shape, at, strict=True):
                number = number * n + i
            assert (int(hi[place]), int(lo[place])) == divmod(number, low_size)
            seen.setdefault((int(hi[place]), int(lo[place])), set()).add(number)
    assert all(len(numbers) == 1 for numbers in seen.values())


def test_empty_arrays_and_paths():
    tree = {"b": [jnp.zeros((0, 3)), jnp.int32(7)], "a": {"w": jnp.ones((2,))}}
    found = digest.tree_digests(tree)
    assert list(found) == ["a/w", "b/0", "b/1"]
    assert found["b/0"] == "0" * 16
    assert digest.tree_digests({}) == {}


def test_finite_flag_covers_every_float_and_position():
    for dtype in ("float32", "bfloat16", "float16"):
        x = np.ones((5, 9), jnp.dtype(dtype))
        assert digest.tree_summaries([jnp.asarray(x)])["0"].finite
        for value in (np.nan, np.inf, -np.inf):
            y = x.copy()
            y[4, 8] = value
            assert not digest.tree_summaries([jnp.asarray(y)])["0"].finite
    largest = jnp.full((3,), jnp.finfo(jnp.float32).max)
    assert digest.tree_summaries([largest, jnp.int32(2**31 - 1)])["0"].finite


def test_differing():
    expected = {"a": "1", "b": "2", "c": "3"}
    assert digest.differing({"a": "1", "b": "9", "d": "4"}, expected) == ["b", "c", "d"]
    assert digest.differing(expected, expected) == []


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"w": np.ones(3)}}, "leaf 'a/w': expected a jax.Array, got ndarray"),
        ({"a": 1.0}, "leaf 'a': expected a jax.Array, got float"),
        ({"a": jax.random.key(0)}, "leaf 'a': key<fry> has no bits of its own"),
        ({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, "two leaves have the path 'a/b'"),
    ],
    ids=["numpy", "float", "typed key", "same path"],
)
def test_bad_trees(tree, message):
    with pytest.raises(ValueError, match=message):
        digest.tree_digests(tree)


def test_long_axis_is_refused():
    leaf = jax.ShapeDtypeStruct((2**32 + 1,), jnp.int8)
    with pytest.raises(ValueError, match=r"'x': an axis of \(4294967297,\) is longer than 2\^32"):
        digest._summary("x", leaf)
