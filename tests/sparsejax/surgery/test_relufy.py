"""ReLU in the place of other activations: the new function, its bound, meshes, shapes, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from sparsejax import (
    FFNConfig,
    LayerConfig,
    MeshConfig,
    ModelConfig,
    Options,
    forward,
    init_params,
    make_mesh,
    param_shapes,
    surgery,
)
from sparsejax.params import flatten
from sparsejax.sharding import tree_shardings
from sparsejax.surgery.relufy import largest_change

FFN = FFNConfig(d_ff=24, activation="silu")
BIASED = dataclasses.replace(FFN, gate_bias=True)
RELU = FFNConfig(d_ff=24)
CONFIG = ModelConfig(
    vocab_size=32,
    d_model=16,
    layers=tuple(LayerConfig(attention=None, ffn=f) for f in (FFN, BIASED, RELU)),
    init_std=0.3,
    dtype="float32",
)
TOKENS = jax.random.randint(jax.random.key(1), (2, 6), 0, 32)


@pytest.fixture(scope="module")
def params():
    made = init_params(CONFIG, jax.random.key(0))
    made["layer_1"]["ffn"]["gate_bias"] = jnp.linspace(-0.5, 0.5, 24)
    return made


def silu(z):
    return z / (1 + np.exp(-z))


def contribution(x, layer, activation):
    """The feed-forward part of a layer in float64."""
    p = {k: np.asarray(v, np.float64) for k, v in flatten(layer).items()}
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["ffn_norm/scale"]
    z = normed @ p["ffn/gate"].T + p.get("ffn/gate_bias", 0)
    return (activation(z) * (normed @ p["ffn/up"].T)) @ p["ffn/down"]


@pytest.mark.parametrize("threshold", [0.0, 0.1, {0: 0.0, 1: -0.2}])
def test_the_new_function(params, threshold):
    config, new, report = surgery.relufy(CONFIG, params, threshold=threshold)
    ts = threshold if isinstance(threshold, dict) else {0: threshold, 1: threshold}
    assert [layer.ffn.activation for layer in config.layers] == ["relu"] * 3
    assert [layer.ffn.gate_bias for layer in config.layers] == [ts[0] != 0, True, False]
    out = forward(config, new, TOKENS, options=Options(capture_hidden=True))
    states = [np.asarray(x, np.float64) for x in out.hidden_states]
    for i, t in (*ts.items(), (2, 0.0)):
        want = contribution(states[i], params[f"layer_{i}"], lambda z, t=t: np.maximum(z - t, 0))
        scale = np.abs(want).max()
        np.testing.assert_allclose(states[i + 1] - states[i], want, atol=2e-5 * scale)
    assert [(r.layer, r.before, r.threshold) for r in report.layers] == [
        (i, "silu", t) for i, t in ts.items()
    ]
    # Everything but the biases is the caller's own array.
    old = flatten(params)
    assert all(leaf is old[p] for p, leaf in flatten(new).items() if "gate_bias" not in p)


def test_the_bound_of_the_report(params):
    z = np.concatenate([np.linspace(-20, 20, 400_001), [-1e3, 1e3]])
    for t in (0.0, 0.1, -0.2, 1.0):
        with np.errstate(over="ignore"):
            silu_gap = np.abs(silu(z) - np.maximum(z - t, 0)).max()
        gelu_gap = np.abs(z * scipy.special.ndtr(z) - np.maximum(z - t, 0)).max()
        np.testing.assert_allclose(largest_change("silu", t), silu_gap, rtol=1e-6)
        np.testing.assert_allclose(largest_change("gelu", t), gelu_gap, rtol=2e-3)  # tanh form
    report = surgery.relufy(CONFIG, params)[2]
    assert report.layers[0].largest_change == pytest.approx(0.27846, abs=1e-5)


def test_chosen_layers_only(params):
    config, new, report = surgery.relufy(CONFIG, params, 1, threshold=0.3)
    assert [layer.ffn.activation for layer in config.layers] == ["silu", "relu", "relu"]
    assert "gate_bias" not in new["layer_0"]["ffn"]
    bias = params["layer_1"]["ffn"]["gate_bias"]
    np.testing.assert_allclose(new["layer_1"]["ffn"]["gate_bias"], bias - 0.3, rtol=1e-6)
    assert len(report.layers) == 1


def test_on_a_mesh_on_shapes_and_under_jit(params):
    mesh = make_mesh(MeshConfig(1, 2, 4))
    placed = jax.device_put(params, tree_shardings(mesh, params))
    config, new, _ = surgery.relufy(CONFIG, placed, threshold=0.1)
    for path, leaf in flatten(new).items():
        want = flatten(tree_shardings(mesh, new))[path]
        assert leaf.sharding.is_equivalent_to(want, leaf.ndim), path
    planned, shapes, _ = surgery.relufy(CONFIG, param_shapes(CONFIG), threshold=0.1)
    assert planned == config
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), new
    )
    traced = jax.jit(lambda p: surgery.relufy(CONFIG, p, threshold=0.1)[1])(params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(traced), jax.device_get(new))


@pytest.mark.parametrize(
    ("layers", "threshold", "message"),
    [
        (2, 0.0, r"layer 2 has ReLU already; layers with another activation: \[0, 1\]"),
        (3, 0.0, "names layer 3"),
        ([0, 0], 0.0, "more than once"),
        (None, float("nan"), "threshold for layer 0 must be a finite number, got nan"),
        (None, "a", "threshold for layer 0 must be a finite number, got 'a'"),
        ([], 0.0, r"layers is empty; name one layer or more, or None for all of \[0, 1\]"),
        (None, {0: 0.1}, r"an entry for each of layers \[0, 1\], got \[0\]"),
    ],
)
def test_wrong_requests(params, layers, threshold, message):
    with pytest.raises(ValueError, match=message):
        surgery.relufy(CONFIG, params, layers, threshold=threshold)


def test_nothing_to_do_is_said(params):
    config, new, _ = surgery.relufy(CONFIG, params)
    with pytest.raises(ValueError, match="every feed-forward layer of this model has ReLU"):
        surgery.relufy(config, new)
