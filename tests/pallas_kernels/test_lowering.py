"""Every kernel lowers for CUDA without a GPU; the engine asked for is the one in the program."""

import re

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import FFNConfig, PackConfig, UnsupportedError, gated_ffn, pack_matmul
from pallas_kernels.gated_ffn import pallas_triton_tail
from pallas_kernels.testing import assert_kernels, lower_for_cuda
from pallas_kernels.tuning import FLOAT32_TILE, HOPPER_TILE, MatmulTile, matmul_tile

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

WALK = ("gated_ffn_lists", "gated_ffn_walk", "gated_ffn_tail_hidden", "gated_ffn_tail_down")
DECODE = ("gated_ffn_decode_hidden", "gated_ffn_decode_down")


def shapes(tokens, width, features, dtype=jnp.bfloat16):
    x = jax.ShapeDtypeStruct((tokens, width), dtype)
    return x, *[jax.ShapeDtypeStruct((features, width), dtype)] * 3


@pytest.mark.parametrize("width", [768, 1024, 1536, 2048, 2560, 4096, 5120, 8192, 1040])
def test_every_width_lowers(width):
    text = lower_for_cuda(
        lambda *a: gated_ffn(*a, implementation="triton"), *shapes(2048, width, 1001)
    )
    assert_kernels(text, *WALK, "gated_ffn_tail_up")


@pytest.mark.parametrize("tokens", [1, 4, 5, 33, 64])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_decode_lowers(tokens, dtype):
    text = lower_for_cuda(
        lambda *a: gated_ffn(*a, implementation="triton"), *shapes(tokens, 2560, 777, dtype)
    )
    assert_kernels(text, *DECODE)


@pytest.mark.parametrize("width", [768, 1536, 2560, 3072, 3584, 5120, 6144, 7168, 8192])
def test_warps_of_decode_are_powers_of_two(width):
    text = lower_for_cuda(
        lambda *a: gated_ffn(*a, implementation="triton").y, *shapes(1, width, 512)
    )
    warps = [int(n) for n in re.findall(r"num_warps\W+=\W*(\d+)", text)]
    assert len(warps) > 1 and all(n & (n - 1) == 0 for n in warps), warps


def test_a_small_tile_asks_for_no_more_than_the_large_one():
    for limit in (65_536, 101_376, 166_912, 232_448):
        tile = HOPPER_TILE.fit(2, limit)
        for columns in (32, 64):
            few = pallas_triton_tail._few_tile(tile, columns)
            assert few.shared_memory(2) <= tile.shared_memory(2) <= limit
            assert few.depth == 256 or limit == 65_536


def test_lists_of_no_width_lower():
    """No row is walked then, and every kernel still has an array to point at."""
    config = FFNConfig(list_width=0, choice="sparse")
    text = lower_for_cuda(
        lambda *a: gated_ffn(*a, implementation="triton", config=config), *shapes(300, 768, 513)
    )
    assert_kernels(text, *WALK)


def test_float32_bias_and_not_gated_lower():
    x, _, up, down = shapes(300, 768, 513, jnp.float32)
    bias = jax.ShapeDtypeStruct((513,), jnp.float32)

    def op(x, up, down, bias):
        return gated_ffn(x, None, up, down, gate_bias=bias, implementation="triton")

    text = lower_for_cuda(op, x, up, down, bias)
    assert_kernels(text, *WALK)
    with pytest.raises(AssertionError, match="gated_ffn_tail_up"):
        assert_kernels(text, "gated_ffn_tail_up")


@pytest.mark.parametrize("method", ["bits", "direct"])
def test_pack_matmul_lowers(method):
    x, w, *_ = shapes(1000, 768, 1000)
    config = PackConfig(method=method)
    text = lower_for_cuda(
        lambda x, w: pack_matmul(x, w, implementation="triton", config=config), x, w
    )
    names = {"bits": ("pack_matmul_bits", "pack_matmul_expand"), "direct": ("pack_matmul_direct",)}
    assert_kernels(text, *names[method])


def test_without_a_wish_the_sparse_engine_runs_where_it_was_measured_to_pay():
    def default(*a):
        return gated_ffn(*a)

    for tokens in (1, 256, 2048):
        assert "gated_ffn_" not in lower_for_cuda(default, *shapes(tokens, 2048, 5632))
    assert "gated_ffn_" not in lower_for_cuda(default, *shapes(16384, 768, 2048))
    assert "gated_ffn_" not in lower_for_cuda(default, *shapes(16384, 2048, 5632, jnp.float32))
    assert_kernels(lower_for_cuda(default, *shapes(16384, 2048, 5632)), *WALK)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("tokens", "width", "features"), [(4096, 2048, 5632), (100, 1040, 777)])
def test_gradients_lower(tokens, width, features, dtype):
    def loss(x, gate, up, down, bias):
        out = gated_ffn(x, gate, up, down, gate_bias=bias, implementation="triton")
        return jnp.sum(out.y.astype(jnp.float32)) + jnp.sum(out.l1)

    arrays = (*shapes(tokens, width, features, dtype), jax.ShapeDtypeStruct((features,), dtype))
    names = ("hidden", "reorder", "x", "weights", "weights_reduce", "bias")
    kernels = [f"gated_ffn_grad_{name}" for name in names]
    kernels += [f"gated_ffn_neuron_{name}" for name in ("bits", "before", "starts")]
    assert_kernels(lower_for_cuda(jax.grad(loss, argnums=(0, 1, 2, 3, 4)), *arrays), *kernels)


def test_a_mesh_in_context_asks_for_shard_map():
    mesh = jax.make_mesh((2, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, w = jnp.zeros((4, 32)), jnp.zeros((64, 32))
    with pallas_kernels.interpret(), jax.set_mesh(mesh):
        with pytest.raises(UnsupportedError, match=r"\['data'\] are not manual here"):
            jax.jit(lambda x, w: gated_ffn(x, w, w, w, implementation="triton"))(x, w)
        with pytest.raises(UnsupportedError, match=r"inside jax\.shard_map"):
            jax.jit(lambda x, w: pack_matmul(x, w, implementation="triton"))(x, w)
        jax.jit(lambda x, w: gated_ffn(x, w, w, w))(x, w)


def test_what_cannot_run_says_why():
    x, w = jnp.zeros((4, 32)), jnp.zeros((64, 32))
    half = [a.astype(jnp.float16) for a in (x, w, w, w)]
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        gated_ffn(x, w, w, w, implementation="triton")
    with pallas_kernels.interpret():
        with pytest.raises(UnsupportedError, match="'silu' makes no zeros"):
            gated_ffn(x, w, w, w, activation="silu", implementation="triton")
        with pytest.raises(UnsupportedError, match="float16 is not one of"):
            gated_ffn(*half, implementation="triton")
        with pytest.raises(UnsupportedError, match="multiple of 16, got 20"):
            gated_ffn(x[:, :20], *[w[:, :20]] * 3, implementation="triton")
        with pytest.raises(UnsupportedError, match="empty operand"):
            gated_ffn(x[:0], w, w, w, implementation="triton")


@pytest.mark.parametrize("limit", [65_536, 101_376, 166_912, 232_448])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_stay_inside_shared_memory(limit, itemsize):
    for tile in (HOPPER_TILE, FLOAT32_TILE, MatmulTile(256, 256, 128, 8, 4, 8)):
        fitted = tile.fit(itemsize, limit)
        assert fitted.shared_memory(itemsize) <= limit
        if tile.shared_memory(itemsize) <= limit:
            assert fitted == tile
    assert matmul_tile(itemsize).shared_memory(itemsize) <= 232_448
    assert FFNConfig().tail_up == HOPPER_TILE
