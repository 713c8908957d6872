"""Chosen activity, layer by layer, seen by the model itself."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import forward, init_params
from sparsejax.calibrate import (
    MEASURED,
    calibrate_gate_bias,
    firing_rates,
    measured_profile,
    restore_gate_bias,
    with_gate_bias,
    without_gate_bias,
)
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.model import Options
from sparsejax.params import flatten
from sparsejax.training.optimizer import OptimizerConfig, make_optimizer
from sparsejax.training.state import new_state

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16)


def layer(attention=ATTENTION, **ffn):
    return LayerConfig(attention=attention, ffn=FFNConfig(**ffn))


PLAIN = ModelConfig(
    vocab_size=64,
    d_model=32,
    layers=(
        layer(d_ff=96),
        layer(d_ff=48, activation="silu"),
        layer(None, d_ff=64, gated=False),
        layer(d_ff=128),
    ),
    init_std=0.1,
)
CONFIG = with_gate_bias(PLAIN)
TOKENS = np.random.default_rng(0).integers(0, 64, (16, 64))


def seen(config, params):
    """nnz per ReLU layer, and tokens per neuron, as the model counts them."""
    stats = forward(config, params, jnp.asarray(TOKENS), options=Options(count_neurons=True)).stats
    nnz = np.asarray(stats.nnz).mean((1, 2))
    places = [config.ffn_layers.index(i) for i in config.sparse_layers]
    return nnz[places], [np.asarray(count) for count in stats.neuron_nnz]


@pytest.mark.parametrize("pattern", ["uniform", "powerlaw"])
def test_the_model_shows_the_activity_asked_for(pattern):
    target, params = [4.0, 1.5, 40.0], init_params(CONFIG, jax.random.key(0))
    new = calibrate_gate_bias(CONFIG, params, TOKENS, target, pattern=pattern)
    nnz, fired = seen(CONFIG, new)
    np.testing.assert_allclose(nnz, target, rtol=0.06)
    hottest = np.sort(fired[0])[-10:].sum() / fired[0].sum()
    assert hottest < 0.2 if pattern == "uniform" else hottest > 0.5
    for path, leaf in flatten(params).items():
        assert path.endswith("gate_bias") or flatten(new)[path] is leaf


def test_nothing_and_everything():
    params = init_params(CONFIG, jax.random.key(0))
    nnz, _ = seen(CONFIG, calibrate_gate_bias(CONFIG, params, TOKENS, [0, 64, 128]))
    np.testing.assert_array_equal(nnz, [0, 64, 128])


def test_rates_sum_to_the_target():
    for pattern in ("uniform", "powerlaw"):
        for nnz in (1.5, 30, 300, 512):
            rates = firing_rates(512, nnz, pattern)
            np.testing.assert_allclose(rates.sum(), nnz, rtol=1e-3)
            assert rates.max() <= 1
    rates = np.sort(firing_rates(512, 5, "powerlaw"))[::-1]
    np.testing.assert_allclose(rates[1] / rates[3], 2, rtol=1e-5)


def test_the_measured_profile():
    same = measured_profile([2816] * 12)
    np.testing.assert_allclose(same, MEASURED)
    deep = measured_profile([5632] * 38)
    assert deep[0] == 2 * MEASURED[0] and deep[-1] == 2 * MEASURED[-1]
    assert max(deep[1:]) == deep[-1] and 2 * MEASURED[2] <= min(deep) < 2.3 * MEASURED[2]
    assert measured_profile([2816, 1408]) == pytest.approx([MEASURED[0], MEASURED[1] / 2])


def test_biases_left_out_and_put_back():
    state = new_state(CONFIG, make_optimizer(OptimizerConfig(), 10), 0)
    bare = without_gate_bias(state)
    paths = [p for p in flatten(state) if not p.endswith("gate_bias")]
    assert list(flatten(bare)) == paths and len(paths) < len(flatten(state))
    changed = jax.tree.map(lambda a: a + 1, bare)
    back = restore_gate_bias(changed, state)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for path, leaf in flatten(back).items():
        old = flatten(state)[path]
        assert leaf is old if path.endswith("gate_bias") else leaf is flatten(changed)[path]


def test_wrong_arguments():
    params = init_params(CONFIG, jax.random.key(0))
    for config, nnz, pattern, message in (
        (CONFIG, [1, 2], "uniform", "one number for each of the 3 ReLU layers, got 2"),
        (CONFIG, [1, 2, 200], "uniform", "nnz of layer 3 must be in [0, 128], got 200"),
        (CONFIG, [1, 2, 3], "zipf", "pattern must be 'uniform' or 'powerlaw', got 'zipf'"),
        (PLAIN, [1, 2, 3], "uniform", "layer 0 has no gate bias"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            calibrate_gate_bias(config, params, TOKENS, nnz, pattern=pattern)
    for tokens in (np.asarray(TOKENS) + CONFIG.vocab_size, np.asarray(TOKENS, np.int64) + 2**32):
        count = tokens.size
        told = f"layer 0 reads is not finite on {count} tokens: ids outside the vocabulary"
        with pytest.raises(ValueError, match=told):
            calibrate_gate_bias(CONFIG, params, tokens, [1, 2, 3])  # pyright: ignore
