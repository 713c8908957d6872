"""What the common checks take, and what they say of the rest."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import param_shapes, presets, surgery
from sparsejax.checks import (
    host_batches,
    host_ids,
    host_indices,
    listed,
    numbers,
    real_number,
    scalar,
    whole_number,
)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (np.array(3), 3),
        (jnp.array(3), 3),
        (np.uint8(3), 3),
        (np.float32(0.1), 0.1),
        (np.float16(0.3), 0.3),
        (jnp.bfloat16(0.7), 0.7),
        (np.float32(1 / 3), 0.33333334),
        (np.float64(1 / 3), 1 / 3),
        (np.float32(np.inf), math.inf),
        (np.True_, True),
        ("a", "a"),
    ],
)
def test_scalars_become_pythons_own(given, want):
    got = scalar(given)
    assert got == want and type(got) is type(want)


def test_arrays_stay():
    for value in (np.array([3]), jnp.array([3]), np.array("a")):
        assert scalar(value) is value
    assert math.isnan(scalar(np.float32("nan")))
    jax.eval_shape(lambda x: x if scalar(x) is x else 1 / 0, np.float32(1))


def test_whole_numbers():
    for value in (2, np.int64(2), np.array(2), jnp.array(2)):
        got = whole_number("f", "n", value)
        assert got == 2 and type(got) is int
    for value in (0, True, np.True_, 2.0, np.float32(2), "2", None, [2], np.array([2])):
        told = f"f: n must be a positive integer, got {value!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
            whole_number("f", "n", value)
    with pytest.raises(ValueError, match=r"^f: n must be an integer from 2 on, got 1$"):
        whole_number("f", "n", 1, least=2)


def test_real_numbers():
    for value in (2, 2.0, np.float32(2), np.array(2), jnp.float32(2)):
        got = real_number("f", "x", value)
        assert got == 2 and type(got) is float
    assert real_number("f", "x", math.inf) == math.inf
    for value in (True, "2", None, [2.0], math.nan, np.float32("nan"), np.array([2.0]), 1j):
        told = f"f: x must be a number, got {value!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
            real_number("f", "x", value)


def test_lists_and_arrays_of_numbers():
    assert listed("f", "runs", np.array([1, 2]), "a list") == [1, 2]
    for value in (None, 2, "ab", np.array(2)):
        with pytest.raises(ValueError, match=r"^f: runs must be a list, got "):
            listed("f", "runs", value, "a list")
    np.testing.assert_array_equal(numbers("f", "x", [[1, 2], [3, 4]]), [[1, 2], [3, 4]])
    assert numbers("f", "x", jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    for value in ("ab", [[1, 2], [3]], None, [1, None], jax.ShapeDtypeStruct((2,), "int32")):
        with pytest.raises(ValueError, match=r"^f: x must hold numbers in equal rows, got "):
            numbers("f", "x", value)
    with pytest.raises(ValueError, match=r"got \[\[0, 1, 2.*\.\.\.$"):
        numbers("f", "x", [list(range(99)), [1]])


def test_integers_of_64_bits():
    fits = np.array([2**31 - 1, -(2**31), 5])
    assert host_ids(fits) is fits and host_indices("f", "x", fits) is fits
    wide = np.array([2**31, -(2**31) - 1, 5])
    np.testing.assert_array_equal(host_ids(wide), [-1, -1, 5])
    np.testing.assert_array_equal(host_ids(np.array([2**64 - 1, 5], np.uint64)), [-1, 5])
    with pytest.raises(ValueError, match=r"^f: x must hold integers of 32 bits, got 2147483648$"):
        host_indices("f", "x", wide)
    unsigned = np.array([2**32 - 1], np.uint32)
    assert host_ids(unsigned) is unsigned


def test_batches():
    tokens = np.array([[1, 2**40]])
    batch = {"tokens": tokens, "positions": None, "loss_mask": [[1, 0]], "targets": "any"}
    (got,) = host_batches("f", iter([batch]))
    assert sorted(got) == ["loss_mask", "tokens"]
    np.testing.assert_array_equal(got["tokens"], [[1, -1]])
    np.testing.assert_array_equal(got["loss_mask"], [[1, 0]])
    on_device = jnp.array([[1, 2]])
    (got,) = host_batches("f", [on_device])
    assert got["tokens"] is on_device


def test_surgery_says_what_was_swapped_or_missing():
    config = presets.tiny()
    shapes = param_shapes(config)
    for call in (
        lambda: surgery.remove_attention(shapes, config, 0),
        lambda: surgery.remove_ffn(shapes, config, 0),
        lambda: surgery.prune_ffn(shapes, config, 0, keep=8),
        lambda: surgery.fuse_ffns(shapes, config, [[0, 1]]),
        lambda: surgery.parallelize_blocks(shapes, config, [[0, 1]]),
        lambda: surgery.relufy(shapes, config),
        lambda: surgery.channel_contribution(shapes, config, []),
        lambda: surgery.drop_dead_neurons(shapes, config, []),
        lambda: surgery.reduce_kv_heads(shapes, config, 0, 1),
    ):
        with pytest.raises(ValueError, match=": config must be a ModelConfig, got dict; the argum"):
            call()
    with pytest.raises(ValueError, match="got ModelConfig and NoneType"):
        surgery.remove_attention(config, None, 0)  # pyright: ignore[reportArgumentType]
    told = "groups must be a list of runs of layers such as [range(2, 5)], got None"
    with pytest.raises(ValueError, match=re.escape(told)):
        surgery.fuse_ffns(config, shapes, None)  # pyright: ignore[reportArgumentType]
    bare = surgery.remove_attention(config, shapes, 0)
    with pytest.raises(ValueError, match="widths must be a list of two numbers of neurons or more"):
        surgery.split_ffn(*bare, 0, 2)  # pyright: ignore[reportArgumentType]


def test_layers_of_other_types():
    config = presets.tiny()
    shapes = param_shapes(config)
    want = surgery.remove_attention(config, shapes, [1])[0]
    for layers in (np.array(1), jnp.array(1), np.int64(1), np.array([1]), jnp.array([1])):
        assert surgery.remove_attention(config, shapes, layers)[0] == want
    for layers, told in (
        (jnp.array([0.0]), "got Array(0., dtype=float32)"),
        ([[0]], "got [0]"),
        (None, "got None"),
        ("ab", "got 'a'"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"must hold layer indices, {told}")):
            surgery.remove_attention(config, shapes, layers)
