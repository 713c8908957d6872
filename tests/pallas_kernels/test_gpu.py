"""On a real card: the same budgets, the shapes and the traps that interpret mode cannot show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PackConfig, gated_ffn, pack_matmul
from pallas_kernels.testing import assert_as_exact_as_dense, ffn_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


def check(inputs):
    """Engine within 1.1 times the dense error against float32, equal counts, equal bits twice."""
    bias = inputs.pop("gate_bias")

    def op(implementation):
        return jax.jit(lambda i, b: gated_ffn(**i, gate_bias=b, implementation=implementation))

    first, second = (op("triton")(inputs, bias) for _ in range(2))
    dense = op("xla")(inputs, bias)
    with jax.default_matmul_precision("highest"):
        wide = op("xla")(*jax.tree.map(lambda a: a.astype(jnp.float32), (inputs, bias)))
    assert_as_exact_as_dense(first.y, dense.y, wide.y, factor=1.1)
    np.testing.assert_array_equal(np.array(first.y), np.array(second.y))
    np.testing.assert_array_equal(np.array(first.l1), np.array(second.l1))
    return first, dense


@pytest.mark.parametrize("width", [768, 1024, 1536, 2048, 2560, 4096, 5120, 8192])
@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_every_width(width, rate):
    out, dense = check(ffn_inputs(1031, width, 1025, dtype=jnp.bfloat16, rate=rate))
    # One rounding of the pre-activation lies between the two: a sign may flip on a near-zero.
    assert np.mean(np.array(out.nnz) != np.array(dense.nnz)) < 0.05


@pytest.mark.parametrize(
    ("long", "short"), [(0, 8), (8, 80), (8, 0), (120, 9), (300, 30), (8, 900)]
)
@pytest.mark.parametrize(("width", "features"), [(1024, 2816), (2048, 5632), (2560, 1000)])
def test_long_rows(long, short, width, features):
    """Rows beyond a list (256), rows beyond 64 only, and what is walked, each as exact as dense."""
    counts = np.full(4096, 10)
    rows = np.random.default_rng(0).permutation(4096)
    counts[rows[:long]] = 900
    counts[rows[long : long + short]] = np.linspace(65, 256, short).astype(int)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(4096, width), (features, width), (features, width)]
    x, up, down = (
        jax.random.normal(k, s).astype(jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)
    )
    # Neuron n fires in row r where n < counts[r], as far as bf16 tells them apart.
    x = x.at[:, 0].set(1.0).at[:, 1].set(jnp.asarray(counts, jnp.bfloat16))
    neuron = jnp.arange(features, dtype=jnp.bfloat16)
    gate = jnp.zeros((features, width), jnp.bfloat16).at[:, 0].set(-neuron).at[:, 1].set(1.0)

    def op(implementation, *arrays):
        out = jax.jit(lambda *a: gated_ffn(*a, implementation=implementation))(*arrays)
        return out.y.astype(jnp.float32), out.nnz

    first, second, dense = (op(name, x, gate, up, down) for name in ("triton", "triton", "xla"))
    with jax.default_matmul_precision("highest"):
        wide = op("xla", *(a.astype(jnp.float32) for a in (x, gate, up, down)))
    np.testing.assert_array_equal(np.array(first[1]), np.array(dense[1]))
    np.testing.assert_array_equal(np.array(first[0]), np.array(second[0]))
    # Row by row: long ones would drown the rest.
    size = jnp.linalg.norm(wide[0], axis=1, keepdims=True)
    assert_as_exact_as_dense(first[0] / size, dense[0] / size, wide[0] / size, factor=1.1)


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 17, 31, 32, 33, 64])
def test_decode(tokens):
    check(ffn_inputs(tokens, 2048, 5632, dtype=jnp.bfloat16, rate=0.05))


@pytest.mark.parametrize("width", [768, 1536, 2560, 3072, 3584, 7168])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_decode_of_every_width(width, tokens):
    check(ffn_inputs(tokens, width, 1025, dtype=jnp.bfloat16, rate=0.05))


@pytest.mark.parametrize("tokens", [3, 40, 200])
def test_float32(tokens):
    with jax.default_matmul_precision("highest"):
        inputs = ffn_inputs(tokens, 768, 777)
        bias = inputs.pop("gate_bias")
        out, dense = (
            gated_ffn(**inputs, gate_bias=bias, implementation=name) for name in ("triton", "xla")
        )
    scale = float(jnp.max(jnp.abs(dense.y)))
    np.testing.assert_allclose(np.array(out.y), np.array(dense.y), rtol=2e-5, atol=2e-5 * scale)


def test_all_ones():
    """Two chained dots in 8 warps were once wrong on this input."""
    ones = jnp.ones((256, 2048), jnp.bfloat16)
    weights = jnp.full((512, 2048), 1 / 2048, jnp.bfloat16)
    out = gated_ffn(ones, weights, weights, weights, implementation="triton")
    np.testing.assert_array_equal(np.array(out.y.astype(jnp.float32)), np.float32(0.25))
    assert (np.array(out.nnz) == 512).all()


@pytest.mark.parametrize("method", ["bits", "direct"])
def test_pack_matmul(method):
    inputs = ffn_inputs(1031, 768, 1025, dtype=jnp.bfloat16, rate=0.05)
    x, w = inputs["x"], inputs["gate"]
    config = PackConfig(method=method)
    got = jax.jit(lambda x, w: pack_matmul(x, w, implementation="triton", config=config))(x, w)
    got.validate()
    expected = pack_matmul(x, w, implementation="xla")
    lost = np.array(got.overflowed() | expected.overflowed())
    np.testing.assert_allclose(np.array(got.counts), np.array(expected.counts), atol=2)
    ours, oracle = (np.array(m.to_dense().astype(jnp.float32)) for m in (got, expected))
    kept = ~np.repeat(lost, 256, axis=-1)[:, :1025]
    np.testing.assert_allclose(ours[kept], oracle[kept], rtol=2**-7, atol=1e-3)
