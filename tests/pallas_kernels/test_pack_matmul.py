"""pack_matmul: both methods of the triton engine in interpret mode against the dense oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import PackConfig, UnsupportedError, pack_matmul
from pallas_kernels.testing import assert_close, ffn_inputs
from pallas_kernels.tuning import MatmulTile

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

TILE = MatmulTile(16, 32, 16, warps=4, stages=2, group=2)


@functools.cache
def packer(method, tile, compression, implementation="triton"):
    config = PackConfig(method=method, tile=TILE)
    options = {"tile": tile, "compression": compression, "implementation": implementation}
    return jax.jit(lambda x, w, b: pack_matmul(x, w, bias=b, config=config, **options))


@pytest.mark.parametrize("method", ["bits", "direct"])
@pytest.mark.parametrize(("features", "dtype"), [(97, jnp.float32), (64, jnp.bfloat16)])
def test_matches_the_dense_oracle(method, features, dtype):
    inputs = ffn_inputs(18, 32, features, dtype=dtype)
    x, w, bias = inputs["x"].reshape(3, 6, 32), inputs["gate"], inputs["gate_bias"]
    with pallas_kernels.interpret():
        got = packer(method, 64, 4)(x, w, bias)
        crowded = packer(method, 64, 4)(x.at[..., 0].set(50.0), w, bias)
    got.validate()
    expected = packer(method, 64, 4, "xla")(x, w, bias)
    np.testing.assert_array_equal(np.array(got.counts), np.array(expected.counts))
    np.testing.assert_array_equal(np.array(got.overflowed()), np.array(expected.overflowed()))
    assert np.array(got.overflowed()).any()
    assert not np.array(got.overflowed()).all()
    ours, oracle = (np.array(m.to_dense().astype(jnp.float32)) for m in (got, expected))
    # One rounding to bfloat16: sums in another order differ by at most one step of it.
    np.testing.assert_allclose(ours, oracle, rtol=2**-7, atol=1e-6)
    # Every tile overflows: counts stay true, the first slots hold the first columns, dense is NaN.
    crowded.validate()
    assert (np.array(crowded.counts).sum(-1) == features).all()
    columns = np.array(crowded.entries)[..., 0, :] & 0xFFFF
    assert (columns == np.arange(16)).all()
    assert np.isnan(np.array(crowded.to_dense().astype(jnp.float32))[..., :64]).all()


@pytest.mark.parametrize("method", ["bits", "direct"])
def test_nan_reaches_the_matrix(method):
    inputs = ffn_inputs(18, 32, 97)
    x = inputs["x"].reshape(3, 6, 32).at[1, 4, 2].set(jnp.nan)
    with pallas_kernels.interpret():
        got = packer(method, 64, 4)(x, inputs["gate"], inputs["gate_bias"])
    assert (np.array(got.counts)[1, 4] == [64, 33]).all()
    values = np.array(got.entries)[1, 4] >> 16
    assert np.isnan(np.asarray(values, np.uint16).view(jnp.bfloat16).astype(np.float32)).all()


def test_float32_values_round_once():
    """Values are the float32 pre-activations rounded to bfloat16, not a bfloat16 sum plus bias."""
    inputs = ffn_inputs(18, 32, 97)
    x, w, bias = inputs["x"], inputs["gate"], inputs["gate_bias"]
    dense = pack_matmul(x, w, bias=bias, tile=128, compression=1, implementation="xla").to_dense()
    pre = np.array(x @ w.T + bias)
    expected = jnp.asarray(np.maximum(pre, 0)).astype(jnp.bfloat16)
    assert_close(dense.astype(jnp.float32), expected.astype(jnp.float32))


def test_what_cannot_run_says_why():
    x, w = jnp.zeros((4, 32)), jnp.zeros((64, 32))
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        pack_matmul(x, w, implementation="triton")
    with pallas_kernels.interpret():
        for options, reason in (
            ({"tile": 48, "compression": 4}, "power of two >= 32, got 48"),
            ({"tile": 512, "config": PackConfig(method="direct")}, "at most 256, got 512"),
        ):
            with pytest.raises(UnsupportedError, match=reason):
                pack_matmul(x, w, implementation="triton", **options)
        with pytest.raises(UnsupportedError, match="multiple of 16, got 20"):
            pack_matmul(jnp.zeros((4, 20)), jnp.zeros((64, 20)), implementation="triton")
        with pytest.raises(UnsupportedError, match="empty operand"):
            pack_matmul(jnp.zeros((0, 32)), w, implementation="triton")


def test_callers_mistakes_are_named():
    x, w = jnp.zeros((4, 32)), jnp.zeros((64, 32))
    with pytest.raises(ValueError, match=r"neuron-major, pass w\.T"):
        pack_matmul(x, w.T)
    with pytest.raises(ValueError, match=r"bias must be \(64,\), got \[32\]"):
        pack_matmul(x, w, bias=jnp.zeros(32))
    with pytest.raises(ValueError, match=r"cast it with w\.astype"):
        pack_matmul(x, w.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="multiple of compression"):
        pack_matmul(x, w, tile=64, compression=3)
    with pytest.raises(ValueError, match="must be one of"):
        pack_matmul(x, w, implementation="cuda")
