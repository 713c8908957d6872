"""Engines from hand-made and from measured statistics, and their times by hand."""

import math

import jax
import numpy as np
import pytest

from sparsejax import init_params, presets
from sparsejax.analysis import activation_stats, engine_estimates, pick_engines
from sparsejax.analysis.activations import ActivationStats, LayerActivations
from sparsejax.calibrate import MEASURED
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig

F, TOKENS = 2816, 16384
RELU = LayerConfig(attention=None, ffn=FFNConfig(d_ff=F))
SILU = LayerConfig(attention=None, ffn=FFNConfig(d_ff=F, activation="silu"))
BARE = LayerConfig(attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8), ffn=None)


def model(*layers, **changes):
    return ModelConfig(**{"vocab_size": 8, "d_model": 1024, "layers": layers} | changes)


def layer(index, nnz, features=F):
    """`nnz` active neurons (a list: of as many tokens each), spread evenly over the layer."""
    rows = np.atleast_1d(nnz)
    histogram = np.bincount(rows, minlength=features + 1)
    # So many tokens of each kind that no neuron counts as hot for its rounding.
    repeats = 10_000
    total = int(rows.sum()) * repeats
    fired = np.full(features, total // features)
    fired[: total % features] += 1
    counts = np.array([total]), np.array([len(rows) * repeats])
    return LayerActivations(index, histogram * repeats, fired, *counts)


def stats(*found):
    return ActivationStats(found, found[0].tokens if found else 0)


def test_dense_layers_take_the_dense_engine_and_sparse_ones_the_other():
    config = model(RELU, SILU, RELU, BARE, RELU)
    found = stats(layer(0, 911), layer(2, 3), layer(4, 141))
    assert pick_engines(config, found, tokens=TOKENS) == ("xla", None, "triton", None, "xla")
    estimates = engine_estimates(config, found, tokens=TOKENS)
    assert [(e.layer, e.nnz, e.engine) for e in estimates] == [
        (0, 911, "xla"),
        (2, 3, "triton"),
        (4, 141, "xla"),
    ]


def test_times_by_hand():
    """19.5 ns for a dense row at D = 1024, F = 2816; 0.46 an entry, 4.5 a row, 25 us, 40 to choose;
    and with the backward pass 74.5 (94.75 in the tail), 1.74, 8, 105 us and 60."""
    config, found = model(RELU), stats(layer(0, [6, 10, 2000, 0]))
    (forward,) = engine_estimates(config, found, tokens=TOKENS)
    assert forward.nnz == 504
    assert forward.dense_us == pytest.approx(16.384 * 19.5)
    rows = (16 * 0.46 + 1.2 * 19.5) / 4 + 4.5
    assert forward.sparse_us == pytest.approx(16.384 * rows + 25 + 40)
    (training,) = engine_estimates(config, found, tokens=TOKENS, training=True)
    assert training.dense_us == pytest.approx(16.384 * 74.5)
    rows = (16 * 1.74 + 1.2 * 94.75) / 4 + 8
    assert training.sparse_us == pytest.approx(16.384 * rows + 105 + 60)
    # Under 2,048 tokens no call chooses.
    (short,) = engine_estimates(config, stats(layer(0, 6)), tokens=1024)
    assert short.sparse_us == pytest.approx(1.024 * (6 * 0.46 + 4.5) + 25)


def test_the_choice_decides_between_layers_of_nearly_equal_times():
    # 16.384 * (19.5 - 4.5 - 0.46 n) beats 65 us for n up to 23, and would 25 without the choice.
    picks = {n: pick_engines(model(RELU), stats(layer(0, n)), tokens=TOKENS)[0] for n in (23, 24)}
    assert picks == {23: "triton", 24: "xla"}


def test_more_active_neurons_never_cost_less():
    for training in (False, True):
        times, engines = [], []
        for nnz in range(0, 400, 3):
            found = stats(layer(0, nnz))
            (e,) = engine_estimates(model(RELU), found, tokens=TOKENS, training=training)
            times.append(e.sparse_us)
            engines.append(e.engine)
        assert (np.diff(times) >= 0).all()
        turns = engines.index("xla")
        assert 0 < turns < len(engines) and "triton" not in engines[turns:]


def test_a_trained_models_layers():
    """Measured on an H200 at these shapes: layers 0 and 11 lose, 1 to 9 gain."""
    rng = np.random.default_rng(0)
    found = stats(*(layer(i, rng.binomial(F, mean / F, 400)) for i, mean in enumerate(MEASURED)))
    picked = pick_engines(model(*[RELU] * 12), found, tokens=TOKENS)
    assert picked[0] == picked[11] == "xla"
    assert picked[1:10] == ("triton",) * 9


@pytest.mark.parametrize("changes", [{"d_model": 1000}, {"dtype": "float16"}])
def test_layers_that_the_sparse_engine_does_not_support(changes):
    found = stats(layer(0, 1))
    (estimate,) = engine_estimates(model(RELU, **changes), found, tokens=TOKENS)
    assert estimate.sparse_us == math.inf and 0 < estimate.dense_us < math.inf
    assert pick_engines(model(RELU, **changes), found, tokens=TOKENS) == ("xla",)


def test_statistics_of_a_model():
    config = presets.tiny()
    params = init_params(config, jax.random.key(0))
    batch = np.random.default_rng(0).integers(0, config.vocab_size, (2, 16))
    found = activation_stats(config, params, [batch])
    # Half of 512 neurons fire: dense.
    assert pick_engines(config, found, tokens=4096) == ("xla",) * config.num_layers
    dense = presets.get("tiny-dense")
    assert pick_engines(dense, stats(), tokens=4096) == (None,) * dense.num_layers


@pytest.mark.parametrize(
    ("found", "tokens", "message"),
    [
        (stats(layer(0, 3)), 64, r"tokens must be at least 65, got 64: fewer run decode kernels"),
        (stats(layer(0, 3)), 2.5, r"tokens must be a positive integer, got 2\.5"),
        (stats(), 4096, r"activation statistics cover layers \[\], not layer 0"),
        (
            stats(layer(0, 3, 99)),
            4096,
            r"stats has 99 neurons and 10000 tokens of layer 0, .* 2816",
        ),
        ([3.0], 4096, r"stats must be what activation_stats gives, got list"),
    ],
)
def test_what_cannot_be_estimated(found, tokens, message):
    with pytest.raises(ValueError, match=message):
        pick_engines(model(RELU), found, tokens=tokens)
