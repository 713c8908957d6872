"""Rows that are too long to walk: which go to the tail, by the counts of all rows of a call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import FFNConfig, gated_ffn
from pallas_kernels.gated_ffn import pallas_triton_long_rows as long_rows
from pallas_kernels.testing import assert_as_exact_as_dense
from pallas_kernels.tuning import MatmulTile

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

FEATURES, WIDTH = 200, 48
TILE = MatmulTile(16, 32, 16, warps=4, stages=2, group=2)
CONFIG = FFNConfig(
    *(0, None, 128), choice="sparse", list_chunk=64, tail_up=TILE, tail_down=TILE
)  # decode_tokens, walk_limit, list_width
SHORT_ONLY = [0, 3, 64, 65, 100, 128, 10, 10]
BOTH = [0, 3, 64, 65, 128, 129, 200, 10, 200, 70]


def inputs_of(counts):
    """Row r has counts[r] active neurons: pre[r, n] = counts[r] - n, exact in bf16."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(len(counts), WIDTH), *[(FEATURES, WIDTH)] * 3]
    x, gate, up, down = (
        jax.random.normal(k, s).astype(jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)
    )
    x = x.at[:, 0].set(1.0).at[:, 1].set(jnp.asarray(counts, jnp.bfloat16))
    gate = (gate * 0).at[:, 0].set(-jnp.arange(FEATURES, dtype=jnp.bfloat16)).at[:, 1].set(1.0)
    return x, gate, up, down


def run(counts, **options):
    inputs = inputs_of(counts)
    with pallas_kernels.interpret():
        call = jax.jit(lambda *a: gated_ffn(*a, implementation="triton", **options))
        out = call(*inputs)
    np.testing.assert_array_equal(np.array(out.nnz), counts)
    dense = gated_ffn(*inputs, implementation="xla")
    wide = gated_ffn(*(a.astype(jnp.float32) for a in inputs), implementation="xla")
    assert_as_exact_as_dense(out.y, dense.y, wide.y)
    assert_as_exact_as_dense(out.l1, dense.l1, wide.l1)
    return out


@pytest.mark.parametrize("few", [0, 4, 128])
@pytest.mark.parametrize("counts", [SHORT_ONLY, BOTH, [0] * 8, [200] * 8, [90] * 8])
def test_every_row_is_walked_or_in_the_tail_whatever_is_few(monkeypatch, counts, few):
    monkeypatch.setattr(long_rows, "_FEW", few)
    first = run(counts, config=CONFIG)
    again = run(counts, config=CONFIG)
    np.testing.assert_array_equal(np.array(first.y), np.array(again.y))


@pytest.mark.parametrize("choice", ["hot", "auto"])
def test_beside_hot_neurons_and_by_choice(choice):
    config = FFNConfig(
        *(0, None, 128), choice=choice, list_chunk=64, tail_up=TILE, tail_down=TILE, choose_tokens=1
    )
    run(BOTH, config=config)


@pytest.mark.parametrize(
    ("beyond", "short", "limit", "number"),
    [
        (0, 0, 64, 0),
        (0, 5, 64, 5),
        (8, 120, 64, 128),
        (8, 121, 256, 8),
        (200, 0, 256, 200),
        (0, 129, 256, 0),
    ],
)
def test_the_tail_takes_both_kinds_where_both_are_few(beyond, short, limit, number):
    count = jnp.asarray([beyond, short], jnp.int32)
    assert int(long_rows.walk_limit(jnp.int32(256), count, 128)) == limit
    assert int(long_rows.number(count, 128)) == number


def test_a_lower_limit_of_the_plan_stands():
    count = jnp.asarray([3, 0], jnp.int32)
    assert int(long_rows.walk_limit(jnp.int32(36), count, 128)) == 36
    assert int(long_rows.walk_limit(jnp.int32(-1), count, 128)) == -1
    # Where the second kind is not told apart, nothing may rest on its count.
    assert int(long_rows.walk_limit(jnp.int32(256), jnp.asarray([0, 0]), 0)) == 256


def test_gradients_go_by_the_plans_limit():
    inputs = inputs_of(BOTH)

    def loss(implementation, *args):
        options = {"config": CONFIG} if implementation == "triton" else {}
        out = gated_ffn(*args, implementation=implementation, **options)
        return jnp.sum(out.y.astype(jnp.float32) ** 2) + jnp.sum(out.l1)

    with pallas_kernels.interpret():
        got = jax.jit(jax.grad(lambda *a: loss("triton", *a), argnums=(0, 1, 2, 3)))(*inputs)
    dense = jax.grad(lambda *a: loss("xla", *a), argnums=(0, 1, 2, 3))(*inputs)
    wide = jax.grad(lambda *a: loss("xla", *a), argnums=(0, 1, 2, 3))(
        *(a.astype(jnp.float32) for a in inputs)
    )
    for a, b, c in zip(got, dense, wide, strict=True):
        assert_as_exact_as_dense(a, b, c)
