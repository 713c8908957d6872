"""The residual stream between layers, when it is asked for."""

import jax
import numpy as np
import pytest

from sparsejax import (
    AttentionConfig,
    FFNConfig,
    LayerConfig,
    ModelConfig,
    Options,
    RopeConfig,
    forward,
    init_params,
)
from sparsejax.modules import Layer, rms_norm

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
FFN = FFNConfig(d_ff=24)
CONFIG = ModelConfig(
    vocab_size=48,
    d_model=16,
    layers=(
        LayerConfig(attention=ATTENTION, ffn=FFN),
        LayerConfig(attention=None, ffn=None),
        LayerConfig(attention=None, ffn=FFN),
        LayerConfig(attention=ATTENTION, ffn=FFN, parallel_with_previous=True),
    ),
    rope=RopeConfig(theta=1e4),
    init_std=0.2,
    dtype="float32",
)


@pytest.fixture(scope="module")
def model():
    params = init_params(CONFIG, jax.random.key(0))
    return params, jax.random.randint(jax.random.key(1), (2, 6), 0, 48)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_states_are_those_between_the_layers(model, remat):
    params, tokens = model
    out = forward(CONFIG, params, tokens, options=Options(capture_hidden=True, remat=remat))
    states = [np.asarray(x) for x in out.hidden_states]
    assert len(states) == CONFIG.num_layers + 1
    np.testing.assert_array_equal(states[0], params["embed"]["embedding"][tokens])
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6))
    reads = {0: 0, 2: 2, 3: 2}  # layer 3 reads what layer 2 read
    for i, source in reads.items():
        layer = Layer(CONFIG, CONFIG.layers[i], Options())
        variables = {"params": params[f"layer_{i}"]}
        delta, _, _ = layer.apply(variables, states[source], positions, None, None)
        np.testing.assert_allclose(states[i + 1], states[i] + delta, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(states[2], states[1])  # a layer with neither part
    last = rms_norm(states[-1], params["final_norm"]["scale"], CONFIG.norm_eps)
    np.testing.assert_allclose(out.hidden, last, rtol=1e-6)


def test_it_costs_nothing_when_not_asked_for(model):
    params, tokens = model
    assert forward(CONFIG, params, tokens).hidden_states == ()

    out = jax.eval_shape(lambda p, t: forward(CONFIG, p, t), params, tokens)
    assert out.hidden_states == ()
