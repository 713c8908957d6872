"""Gradients of the triton engine in interpret mode, on every way through it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import FFNConfig, _triton, gated_ffn
from pallas_kernels.gated_ffn import pallas_triton, pallas_triton_plan
from pallas_kernels.gated_ffn.cost import Costs
from pallas_kernels.gated_ffn.pallas_triton_backward import Residuals
from pallas_kernels.testing import assert_as_exact_as_dense, assert_close, ffn_inputs
from pallas_kernels.tuning import MatmulTile

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

TILE = MatmulTile(16, 32, 16, warps=4, stages=2, group=2)
CONFIG = FFNConfig(
    decode_tokens=0,
    choose_tokens=8,
    hot_neurons=16,
    list_width=32,
    walk_limit=25,
    list_chunk=64,
    tail_up=TILE,
    tail_down=TILE,
    grad_segment=4,
    grad_rows=4,
)
TOKENS, WIDTH, FEATURES = 40, 48, 97
HOT = jnp.array([3, 40, 41, 96])


@pytest.fixture(autouse=True)
def small_is_worth_it(monkeypatch):
    """At these sizes the real costs would make every call dense: here that pays from 30 entries."""
    costs = Costs(1.0, row=0.0, dense_row=30.0, again_row=0.0, hot_row=0.5, fixed=0.0)
    monkeypatch.setattr(pallas_triton_plan, "costs", lambda *_, **__: costs)


def loss(inputs, weights, implementation, gated, config):
    gate_bias, rest = inputs["gate_bias"], {k: inputs[k] for k in inputs if k != "gate_bias"}
    rest["gate"] = rest["gate"] if gated else None
    out = gated_ffn(**rest, gate_bias=gate_bias, implementation=implementation, config=config)
    dy, dl1 = weights
    value = jnp.sum(dy * out.y.astype(jnp.float32)) + jnp.sum(dl1 * out.l1)
    return value, (out.nnz, out.sparse)


@functools.cache
def gradients(implementation, gated=True, config=CONFIG):
    """One compiled function for all patterns: interpret mode compiles slowly."""
    return jax.jit(
        lambda inputs, weights: jax.grad(loss, has_aux=True)(
            inputs, weights, implementation, gated, config
        )
    )


def cotangents(inputs):
    rng = np.random.default_rng(1)
    x = inputs["x"]
    dy, dl1 = rng.standard_normal(x.shape), 0.1 * rng.standard_normal(x.shape[:-1])
    return jnp.asarray(dy, jnp.float32), jnp.asarray(dl1, jnp.float32)


def check(inputs, gated=True, config=CONFIG):
    """Runs both engines; returns (which way: 0 dense or 1 sparse, active neurons per token)."""
    weights = cotangents(inputs)
    with pallas_kernels.interpret():
        got, (nnz, sparse) = gradients("triton", gated, config)(inputs, weights)
    expected, (dense_nnz, _) = gradients("xla", gated, None)(inputs, weights)
    np.testing.assert_array_equal(np.array(nnz), np.array(dense_nnz))
    names = [name for name in expected if gated or name != "gate"]
    if inputs["x"].dtype == jnp.float32:
        for name in names:
            assert_close(got[name], expected[name])
    else:
        wide = {k: v.astype(jnp.float32) for k, v in inputs.items()}
        truth, _ = gradients("xla", gated, None)(wide, weights)
        for name in names:
            assert_as_exact_as_dense(got[name], expected[name], truth[name], factor=1.2)
    return int(sparse), np.array(nnz)


def quiet(inputs, threshold):
    """No long rows: every token has the same threshold."""
    return inputs | {"x": inputs["x"].at[:, 0].set(threshold)}


def heat(inputs):
    """A few neurons that fire nearly always."""
    return inputs | {"gate_bias": inputs["gate_bias"].at[HOT].add(3.0)}


def plan(inputs):
    pre = inputs["x"] @ inputs["gate"].T + inputs["gate_bias"]
    with pallas_kernels.interpret():
        return pallas_triton_plan.plan(pre, None, WIDTH, CONFIG, training=True)


def test_all_ways_of_one_program():
    inputs = ffn_inputs(TOKENS, WIDTH, FEATURES, rate=0.05)
    # Lists alone; neurons of several segments (4 entries each) and of none.
    few = quiet(inputs, -1.8)
    sparse, nnz = check(few)
    assert sparse == 1
    assert nnz.max() <= 25
    fired = np.array((few["x"] @ few["gate"].T + few["gate_bias"] > 0).sum(0))
    assert (fired == 0).any()
    assert (fired > 4).any()
    # Long rows beside short and empty ones.
    sparse, nnz = check(inputs)
    assert sparse == 1
    assert (nnz > 25).any()
    assert nnz[0] == 0
    # Hot neurons apart, without and with long rows.
    for hot in (heat(few), heat(inputs)):
        made = plan(hot)
        assert int(made.way) == pallas_triton_plan.HOT
        assert set(np.array(HOT)) <= set(np.array(made.hot))
        assert check(hot)[0] == 1
    # Nothing fires; everything fires, and the call turns dense.
    sparse, nnz = check(quiet(inputs, -50.0))
    assert (sparse, nnz.max()) == (1, 0)
    sparse, nnz = check(quiet(inputs, 50.0))
    assert (sparse, nnz.min()) == (0, FEATURES)


@pytest.mark.parametrize(
    ("choice", "walk_limit", "residuals"),
    [
        ("auto", 25, "full"),
        ("hot", 25, "full"),
        ("dense", 25, "full"),
        # All rows go to the tail: lists are not even made.
        ("sparse", -1, "compact"),
        ("hot", -1, "full"),
    ],
)
def test_a_sparse_forward_and_a_dense_backward(choice, walk_limit, residuals, monkeypatch):
    """More than a quarter of the rows is long; projections that were not kept are not read."""
    # What is not written may look like anything.
    monkeypatch.setattr(_triton, "unwritten", lambda shape, dtype: jnp.full(shape, 0.5, dtype))
    config = dataclasses.replace(CONFIG, choice=choice, walk_limit=walk_limit, residuals=residuals)
    inputs = ffn_inputs(TOKENS, WIDTH, FEATURES, rate=0.05)
    inputs = heat(inputs) if choice == "hot" else inputs
    inputs["x"] = inputs["x"].at[::3, 0].set(-0.3)
    sparse, nnz = check(inputs, True, config)
    assert 0.3 < (nnz > 25).mean() < 0.6
    assert sparse == (choice != "dense")


def test_short_calls_with_many_long_rows():
    """Under `choose_tokens` nothing is chosen, and the forward pass runs sparse by itself."""
    config = dataclasses.replace(CONFIG, choose_tokens=1000, residuals="full", walk_limit=None)
    inputs = ffn_inputs(TOKENS, WIDTH, FEATURES, rate=0.2)
    for x in (inputs["x"], quiet(inputs, 50.0)["x"]):  # long rows, and all rows
        check(inputs | {"x": x}, True, config)


@pytest.mark.parametrize("changes", [{"grad_columns": 128}, {"grad_columns": 512}])
def test_weight_gradients_do_not_depend_on_how_d_is_sliced(changes):
    """D = 272 is 3 slices of 128, 2 of 256 or 1 of 512, the last one partly filled in each case."""
    inputs = quiet(ffn_inputs(TOKENS, 272, FEATURES, rate=0.05), -1.8)
    fired = np.array((inputs["x"] @ inputs["gate"].T + inputs["gate_bias"] > 0).sum(0))
    assert (fired > CONFIG.grad_segment).any()  # sums of several segments too
    weights = cotangents(inputs)
    config = dataclasses.replace(CONFIG, choice="sparse")
    sliced = dataclasses.replace(config, grad_weights_warps=2, **changes)
    with pallas_kernels.interpret():
        (expected, (nnz, _)), (got, _) = (
            gradients("triton", True, c)(inputs, weights) for c in (config, sliced)
        )
    assert nnz.max() <= 25  # no row is the dense backward's
    for name, gradient in expected.items():
        assert np.abs(np.array(gradient)).max() > 0
        np.testing.assert_array_equal(np.array(got[name]), np.array(gradient))


def test_same_bits_twice_and_nan_reaches_every_gradient_it_should():
    inputs = heat(ffn_inputs(TOKENS, WIDTH, FEATURES, rate=0.05))
    weights = cotangents(inputs)
    with pallas_kernels.interpret():
        first, second = (gradients("triton", True)(inputs, weights)[0] for _ in range(2))
        for name, gradient in first.items():
            np.testing.assert_array_equal(np.array(gradient), np.array(second[name]))
        spoiled = inputs | {"x": inputs["x"].at[5, 3].set(jnp.nan)}
        got, (nnz, _) = gradients("triton", True)(spoiled, weights)
    # A NaN token makes all its neurons active: it is a long row, and reaches all weights.
    assert nnz[5] == FEATURES
    for name in ("gate", "up", "down"):
        assert np.isnan(np.array(got[name])).any(axis=1).all()
    finite = np.isfinite(np.array(got["x"]))
    assert not finite[5].any()
    assert finite[np.arange(TOKENS) != 5].all()


def test_not_gated_bfloat16_leading_dimensions():
    inputs = heat(ffn_inputs(TOKENS, 32, 97, dtype=jnp.bfloat16, rate=0.05))
    inputs = inputs | {"up": inputs["gate"], "x": inputs["x"].reshape(4, 10, 32)}
    assert check(inputs, gated=False)[0] == 1


@pytest.mark.slow
def test_vmap_over_experts_remat_and_accumulation():
    config = FFNConfig(
        decode_tokens=0, choice="sparse", list_width=32, list_chunk=32, tail_up=TILE, tail_down=TILE
    )
    experts = [ffn_inputs(12, 32, 33, rate=0.05) for _ in range(2)]
    experts[1] = experts[1] | {"x": quiet(experts[1], -2.0)["x"] * 0.5}
    stacked = {k: jnp.stack([e[k] for e in experts]) for k in experts[0]}
    weights = cotangents(stacked)

    def total(inputs, implementation):
        def micro(total, part):  # half of every expert's tokens, recomputed in its backward pass
            each = jax.checkpoint(lambda i, w: loss(i, w, implementation, True, config))
            x, *weights = part
            return total + jnp.sum(jax.vmap(each)(inputs | {"x": x}, tuple(weights))[0]), None

        halves = [
            jnp.moveaxis(a.reshape(2, 2, 6, *a.shape[2:]), 1, 0) for a in (inputs["x"], *weights)
        ]
        return jax.lax.scan(micro, jnp.float32(0), tuple(halves))[0]

    with pallas_kernels.interpret():
        got = jax.jit(jax.grad(functools.partial(total, implementation="triton")))(stacked)
    expected = jax.grad(functools.partial(total, implementation="xla"))(stacked)
    for name, gradient in expected.items():
        assert_close(got[name], gradient)


def test_residuals_are_x_and_lists():
    """Bytes of what the backward pass keeps, beside x and the weights, which exist anyway."""

    def kept(config, dtype=jnp.bfloat16):
        tokens, width, features = 4096, 2048, 5632
        x = jax.ShapeDtypeStruct((tokens, width), dtype)
        w = jax.ShapeDtypeStruct((features, width), dtype)

        def forward(x, gate, up, down):
            return pallas_triton.forward(
                *(x, gate, up, down, None), count_neurons=False, config=config, training=True
            )[1]

        saved = jax.eval_shape(forward, x, w, w, w)
        assert isinstance(saved, Residuals)
        extra = saved._replace(x=None, gate=None, up=None, down=None)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(extra)) / tokens

    compact = kept(FFNConfig())
    # 256 entries of 2 + 2 + 2 bytes, one count, and the plan.
    assert compact == pytest.approx(256 * 6 + 4, abs=1)
    assert kept(FFNConfig(residuals="full")) == pytest.approx(compact + 4 * 5632, abs=1)
