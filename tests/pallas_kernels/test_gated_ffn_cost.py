"""Prices of known counts, against the device's own decision and against numbers by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import FFNConfig
from pallas_kernels.gated_ffn import pallas_triton_plan as plan
from pallas_kernels.gated_ffn.cost import HOT_GAIN, call_times, most_hot
from sparsejax.calibrate import firing_rates

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def counts(fires):
    """Histogram and firings of (tokens, F) booleans."""
    features = fires.shape[1]
    return np.bincount(fires.sum(1), minlength=features + 1), fires.sum(0)


def test_by_hand():
    # D = 1024, F = 2816: an entry is 0.46 ns, a row 4.5, a dense row 62 / 4 + 8 / 2 = 19.5.
    histogram, fired = np.zeros(2817, np.int64), np.zeros(2816, np.int64)
    histogram[[0, 10, 2000]] = 1, 2, 1
    fired[:2020] = 1  # 2,020 of 2,816 on one of four tokens each: hot, but too many
    setting = {"tokens": 4096, "width": 1024, "config": FFNConfig()}
    got = call_times(histogram, fired, training=False, **setting)
    # Long rows cost 1.2 * 19.5 in the tail.
    assert got.walked == pytest.approx(4096 * ((2 * 4.6 + 23.4) / 4 + 4.5) + 25e3)
    assert got.dense == pytest.approx(4096 * 19.5)
    assert got.hot == np.inf and got.sparse == got.walked
    # And the backward pass: 1.74 an entry, 8 a row, 74.5 a dense row, 105 us fixed.
    got = call_times(histogram, fired, training=True, **setting)
    assert got.walked == pytest.approx(4096 * ((2 * 17.4 + 1.2 * 94.75) / 4 + 8) + 105e3)
    # A dense call projects again, 81 / 4, unless it kept both projections.
    assert got.dense == pytest.approx(4096 * (74.5 + 20.25))
    full = call_times(
        histogram, fired, training=True, **setting | {"config": FFNConfig(residuals="full")}
    )
    assert full.dense == pytest.approx(4096 * 74.5) and full.walked == got.walked


def test_hot_neurons_by_hand():
    # Of 1,000 tokens neuron 0 fires on 200, over 10/256 of them; neuron 1 on 39, just below.
    histogram, fired = np.zeros(5633, np.int64), np.zeros(5632, np.int64)
    histogram[30], histogram[0] = 20, 980
    fired[:2], fired[2:] = (200, 39), 0
    fired[2 : 2 + 361] = 1  # 600 firings in all
    setting = {"tokens": 8192, "width": 2048, "training": False}
    got = call_times(histogram, fired, config=FFNConfig(), **setting)
    mean = 0.02 * 30 * (400 / 600) * 0.92
    assert got.hot == pytest.approx(8192 * (mean + 9 + 6.5) + 25e3)
    assert got.sparse == got.walked < got.hot  # a small dense layer costs more than 10 entries
    for config in (FFNConfig(choose_tokens=9000), FFNConfig(choice="sparse")):
        assert call_times(histogram, fired, config=config, **setting).hot == np.inf


@pytest.mark.parametrize("pattern", ["uniform", "powerlaw"])
@pytest.mark.parametrize("training", [False, "compact", "full"])
def test_the_device_decides_the_same(pattern, training):
    width, features, tokens = 2048, 5632, 4096
    config, training = FFNConfig(residuals=training or "compact"), bool(training)
    rng, ways = np.random.default_rng(0), []
    for nnz in (5, 20, 40, 50, 70, 90, 120, 300):
        fires = rng.random((256, features)) < firing_rates(features, nnz, pattern)
        histogram, fired = counts(fires)
        times = call_times(
            histogram, fired, tokens=tokens, width=width, config=config, training=training
        )
        # The same 256 tokens, again and again, are any sample of the call.
        pre = jnp.where(np.tile(fires, (17, 1))[:tokens], 1.0, -1.0).astype(jnp.bfloat16)
        with pallas_kernels.interpret():
            way = int(plan.plan(pre, None, width, config, training=training).way)
        hot = times.hot < HOT_GAIN * times.walked
        sparse = plan.HOT if hot else plan.SPARSE
        ways.append(way)
        assert way == (sparse if times.sparse < times.dense else plan.DENSE), (nnz, times)
    assert ways[0] != plan.DENSE == ways[-1]


def test_how_many_may_be_hot():
    found = [most_hot(f, FFNConfig(hot_neurons=h)) for f, h in ((5632, 128), (200, 128), (8, 0))]
    assert found == [128, 48, 16]
