"""The triton engine in interpret mode against the dense engine: every path, every trap."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import FFNConfig, gated_ffn
from pallas_kernels.gated_ffn import pallas_triton, pallas_triton_plan, pallas_triton_walk
from pallas_kernels.testing import assert_as_exact_as_dense, assert_close, ffn_inputs
from pallas_kernels.tuning import MatmulTile
from sparsejax.calibrate import firing_rates
from tests.shared_data import SHARED, needs_shared

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

TILE = MatmulTile(16, 32, 16, warps=4, stages=2, group=2)
MIXED = FFNConfig(
    decode_tokens=0, walk_limit=25, list_width=32, list_chunk=64, tail_up=TILE, tail_down=TILE
)
ALL_ROWS = FFNConfig(decode_tokens=0, walk_limit=-1, tail_up=TILE, tail_down=TILE)
CHOOSES = FFNConfig(decode_tokens=0, list_width=128, tail_up=TILE, tail_down=TILE)
DECODE = FFNConfig(decode_neurons=16)


@functools.cache
def engine(config, gated=True, implementation="triton"):
    """One compiled function per configuration: interpret mode compiles slowly."""

    def op(x, gate, up, down, gate_bias):
        gate = gate if gated else None
        options = {"gate_bias": gate_bias, "implementation": implementation}
        return gated_ffn(x, gate, up, down, config=config, **options)

    return jax.jit(op)


def ungated(inputs):
    """The thresholds of `ffn_inputs` sit in gate: give them to up, which decides without a gate."""
    return inputs | {"up": inputs["gate"]}


def run(inputs, config, gated=True):
    with pallas_kernels.interpret():
        return engine(config, gated)(**inputs)


def dense(inputs, gated=True):
    return engine(None, gated, "xla")(**inputs)


def check(inputs, config, gated=True):
    out, expected = run(inputs, config, gated), dense(inputs, gated)
    assert out.y.shape == inputs["x"].shape
    assert out.y.dtype == inputs["x"].dtype
    assert (out.l1.dtype, out.nnz.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_array_equal(np.array(out.nnz), np.array(expected.nnz))
    if inputs["x"].dtype == jnp.float32:
        assert_close(out.y, expected.y)
        assert_close(out.l1, expected.l1)
    else:
        wide = dense({k: v.astype(jnp.float32) for k, v in inputs.items()}, gated)
        assert_as_exact_as_dense(out.y, expected.y, wide.y)
        assert_as_exact_as_dense(out.l1, expected.l1, wide.l1)
    return out


def test_walk_and_tail_share_one_call():
    inputs = ffn_inputs(18, 48, 97)
    out = check(inputs, MIXED)
    # Empty, full and long rows are really there, on both sides of the limit and of the list width.
    nnz = np.array(out.nnz)
    assert nnz[0] == 0
    assert nnz[1] == 97
    assert ((nnz > 0) & (nnz <= 25)).any()
    assert (nnz > 32).any()
    # The same compiled program: nothing active, everything active, NaN and infinity, same bits.
    quiet = inputs | {"x": inputs["x"].at[:, 0].set(-50.0)}
    assert (np.array(check(quiet, MIXED).nnz) == 0).all()
    check(inputs | {"x": inputs["x"].at[:, 0].set(50.0)}, MIXED)
    again = run(inputs, MIXED)
    np.testing.assert_array_equal(np.array(again.y), np.array(out.y))
    np.testing.assert_array_equal(np.array(again.l1), np.array(out.l1))
    for bad in (jnp.nan, jnp.inf):
        spoiled = run(inputs | {"x": inputs["x"].at[5, 3].set(bad)}, MIXED)
        finite = np.isfinite(np.array(spoiled.y))
        assert not finite[5].any()
        assert finite[np.arange(18) != 5].all()
        assert not np.isfinite(spoiled.l1[5])


def test_all_rows_dense():
    check(ffn_inputs(18, 48, 97), ALL_ROWS)


def test_the_device_chooses():
    sparse = ffn_inputs(18, 48, 97, rate=0.05)
    check(sparse, CHOOSES)
    check(sparse | {"x": sparse["x"].at[:, 0].set(50.0)}, CHOOSES)


@pytest.mark.parametrize(
    ("nnz", "way"), [(60, pallas_triton_plan.HOT), (120, pallas_triton_plan.DENSE)]
)
def test_hot_neurons_are_weighed_by_what_is_left_to_walk(nnz, way):
    # Measured at 120 by a power law: 1.95 ms with the hottest 118 apart, 1.69 dense.
    rates = firing_rates(5632, nnz, "powerlaw")
    fires = np.random.default_rng(0).random((4096, 5632)) < rates
    pre = jnp.where(fires, 1.0, -1.0).astype(jnp.bfloat16)
    settings = FFNConfig(hot_neurons=128)
    with pallas_kernels.interpret():
        plan = pallas_triton_plan.plan(pre, None, 2048, settings, training=False)
    assert int(plan.way) == way
    # Beside the hot ones no row is longer than a list.
    assert int(plan.limit[0]) == settings.list_width


@pytest.mark.parametrize("config", [MIXED, ALL_ROWS], ids=["mixed", "all_rows"])
def test_not_gated_bfloat16_leading_dimensions(config):
    inputs = ungated(ffn_inputs(18, 32, 65, dtype=jnp.bfloat16))
    check(inputs | {"x": inputs["x"].reshape(3, 6, 32)}, config, gated=False)


@pytest.mark.parametrize(
    ("tokens", "gated", "dtype"),
    [
        (1, True, jnp.float32),
        (3, False, jnp.bfloat16),
        (5, True, jnp.bfloat16),
        (33, True, jnp.float32),
    ],
)
def test_decode(tokens, gated, dtype):
    inputs = ffn_inputs(tokens, 48, 97, dtype=dtype)
    inputs = inputs if gated else ungated(inputs)
    check(inputs, DECODE, gated)
    check(inputs | {"x": inputs["x"].at[:, 0].set(-1.0)}, DECODE, gated)
    quiet = run(inputs | {"x": inputs["x"].at[:, 0].set(-50.0)}, DECODE, gated)
    assert not np.array(quiet.y.astype(jnp.float32)).any()
    spoiled = run(inputs | {"x": inputs["x"].at[0, 3].set(jnp.nan)}, DECODE, gated)
    finite = np.isfinite(np.array(spoiled.y.astype(jnp.float32)))
    assert not finite[0].any()
    assert finite[1:].all()


@pytest.mark.parametrize(("features", "dtype"), [(65_536, "uint16"), (65_600, "int32")])
def test_columns_of_wide_layers(features, dtype):
    active = np.array([0, 32_768, 65_535, features - 1])
    pre = jnp.full((1, features), -1.0).at[0, active].set(jnp.asarray([1.0, 2.0, 3.0, 4.0]))
    with pallas_kernels.interpret():
        nnz, columns, values, *_ = pallas_triton_walk.lists(
            jnp.array([8], jnp.int32), pre, None, None, width=8, chunk=32_768, warps=1
        )
    wanted = np.unique(active)
    assert columns.dtype == dtype and int(nnz[0]) == len(wanted)
    np.testing.assert_array_equal(np.array(columns)[0, : len(wanted)], wanted)
    np.testing.assert_array_equal(np.array(values)[0, : len(wanted)], np.array(pre)[0, wanted])


@pytest.mark.parametrize("config", [MIXED, ALL_ROWS])
def test_biases_that_do_nothing_and_that_silence(config):
    inputs = ffn_inputs(18, 48, 97)
    nothing, bias = jnp.zeros_like(inputs["gate_bias"]), inputs["gate_bias"]
    zeros, none = (run(inputs | {"gate_bias": b}, config) for b in (nothing, None))
    for a, b in zip(jax.tree.leaves(zeros), jax.tree.leaves(none), strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))
    silent = inputs | {"gate_bias": bias.at[::3].set(-jnp.inf)}
    assert int(check(silent, config).nnz.max()) == 97 - 33


def test_counts_neurons():
    inputs = ffn_inputs(18, 32, 65)
    gate_bias = inputs.pop("gate_bias")
    options = {"gate_bias": gate_bias, "count_neurons": True}
    with pallas_kernels.interpret():
        out = gated_ffn(**inputs, **options, implementation="triton", config=MIXED)
    expected = gated_ffn(**inputs, **options, implementation="xla")
    np.testing.assert_array_equal(np.array(out.neuron_nnz), np.array(expected.neuron_nnz))


def test_gradients_and_remat():
    inputs = ffn_inputs(8, 32, 33)

    def loss(inputs, implementation):
        gate_bias, rest = inputs["gate_bias"], {k: inputs[k] for k in inputs if k != "gate_bias"}
        options = {"gate_bias": gate_bias, "implementation": implementation, "config": DECODE}
        out = jax.checkpoint(lambda r: gated_ffn(**r, **options))(rest)
        return jnp.sum(out.y**2) + 0.1 * jnp.sum(out.l1)

    with pallas_kernels.interpret():
        got = jax.jit(jax.value_and_grad(loss), static_argnums=1)(inputs, "triton")
    expected = jax.value_and_grad(loss)(inputs, "xla")
    assert_close(got[0], expected[0])
    for name, gradient in expected[1].items():
        assert float(jnp.max(jnp.abs(gradient))) > 0
        assert_close(got[1][name], gradient)


def test_vmap_over_layers():
    layers = [ffn_inputs(4, 32, 33 + 0 * i) for i in range(2)]
    layers[1]["x"] = layers[1]["x"] * 0.5
    stacked = {k: jnp.stack([layer[k] for layer in layers]) for k in layers[0]}
    with pallas_kernels.interpret():
        out = jax.jit(jax.vmap(lambda i: engine(DECODE)(**i)))(stacked)
    for i, layer in enumerate(layers):
        expected = dense(layer)
        assert_close(out.y[i], expected.y)
        np.testing.assert_array_equal(np.array(out.nnz[i]), np.array(expected.nnz))


def test_shard_map_over_tokens():
    inputs = ffn_inputs(8, 32, 33)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    token, whole = jax.P("data"), jax.P()

    def op(x, gate, up, down, gate_bias):
        return tuple(
            gated_ffn(
                x, gate, up, down, gate_bias=gate_bias, implementation="triton", config=DECODE
            )
        )

    with pallas_kernels.interpret():
        sharded = jax.shard_map(
            op,
            mesh=mesh,
            in_specs=(token, whole, whole, whole, whole),
            out_specs=token,
            check_vma=False,
        )
        y, l1, nnz = jax.jit(sharded)(*inputs.values())
    expected = dense(inputs)
    assert_close(y, expected.y)
    assert_close(l1, expected.l1)
    np.testing.assert_array_equal(np.array(nnz), np.array(expected.nnz))


@needs_shared
def test_real_patterns():
    """Stored masks of a trained model: rows of 0 to 900 active neurons."""
    stored = np.load(SHARED / "data" / "activations" / "d1024_l12_f2816.npz")["bits"]
    bits = np.unpackbits(stored[:, 0, :24], axis=-1).astype(bool)
    rng = np.random.default_rng(0)
    features = bits.shape[-1]
    x = jnp.asarray(rng.standard_normal((24, 32)), jnp.float32)
    up, down = jnp.asarray(rng.standard_normal((2, features, 32)) / 6, jnp.float32)
    size = np.abs(rng.standard_normal((24, features))) + 0.01
    config = FFNConfig(tail_up=TILE, tail_down=TILE)
    after = jax.jit(functools.partial(pallas_triton.after_gate, gated=True, config=config))
    for layer in (0, 1, 6, 11):
        pre = jnp.asarray(np.where(bits[layer], size, -size), jnp.float32)
        with pallas_kernels.interpret():
            y, l1, nnz = after(x, pre, up, down)
        h = jnp.maximum(pre, 0) * (x @ up.T)
        np.testing.assert_array_equal(np.array(nnz), bits[layer].sum(-1))
        assert_close(y, h @ down)
        assert_close(l1, jnp.sum(jnp.abs(h), axis=-1))
