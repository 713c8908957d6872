"""Shares, errors and FLOPs of the report, against NumPy on layers whose inputs are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import FFNConfig, LayerConfig, ModelConfig, init_params, presets
from sparsejax.convert import sparsity_report

BOUNDS = (0.01, 0.1)


def model(**ffn):
    """Two layers without attention, so that NumPy follows in a few lines."""
    f = FFNConfig(d_ff=48, **ffn)
    config = ModelConfig(
        vocab_size=40,
        d_model=16,
        layers=(LayerConfig(attention=None, ffn=f),) * 2,
        init_std=0.6,
        dtype="float32",
    )
    params = init_params(config, jax.random.key(0))
    for i in range(2):
        layer = params[f"layer_{i}"]
        layer["ffn_norm"]["scale"] = jnp.linspace(0.5, 1.5, 16)
        if f.gate_bias:
            layer["ffn"]["gate_bias"] = jnp.linspace(-1, 1, 48)
    return config, params


def hidden(config, params, tokens):
    """h and down of each layer."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = p["embed"]["embedding"][tokens.reshape(-1)]
    for i in range(2):
        w, f = p[f"layer_{i}"]["ffn"], config.layers[i].ffn
        normed = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + config.norm_eps)
        normed = normed * p[f"layer_{i}"]["ffn_norm"]["scale"]
        first = normed @ (w["gate"] if f.gated else w["up"]).T + w.get("gate_bias", 0)
        h = np.maximum(first, 0) if f.activation == "relu" else first / (1 + np.exp(-first))
        h = h * (normed @ w["up"].T) if f.gated else h
        yield h, w["down"]
        x = x + h @ w["down"]


@pytest.mark.parametrize(
    "ffn",
    [
        {"activation": "silu"},
        {"activation": "relu"},
        {"activation": "relu", "gated": False},
        {"activation": "silu", "gate_bias": True},
    ],
)
def test_shares_errors_and_flops(ffn):
    config, params = model(**ffn)
    # More than one chunk, and a last one that is not full.
    tokens = np.random.default_rng(0).integers(0, 40, (3, 90))
    report = sparsity_report(config, params, tokens, BOUNDS)
    assert (report.tokens, report.thresholds) == (270, BOUNDS)
    matrices = 3 if config.layers[0].ffn.gated else 2
    for got, (h, down) in zip(report.layers, hidden(config, params, tokens), strict=True):
        assert got.exact_zero == pytest.approx(np.mean(h == 0), abs=1e-12)
        assert (got.exact_zero > 0.2) is (ffn["activation"] == "relu")
        for k, bound in enumerate(BOUNDS):
            small = np.abs(h) < bound
            # A value at the very bound may fall on either side in float32.
            assert got.below[k] == pytest.approx(small.mean(), abs=2 / h.size)
            lost, full = (small * h) @ down, h @ down
            error = np.sqrt(np.sum(lost**2) / np.sum(full**2))
            assert got.error[k] == pytest.approx(error, rel=1e-2)
            flops = (1 + (matrices - 1) * (1 - got.below[k])) / matrices
            assert got.flops[k] == pytest.approx(flops, rel=1e-12)
    head, ffns = 40 * 16, 2 * matrices * 48 * 16
    for k in range(2):
        left = head + sum(layer.flops[k] for layer in report.layers) * ffns / 2
        assert report.model_speedup[k] == pytest.approx((head + ffns) / left)
    now = [(1 + (matrices - 1) * (1 - x.exact_zero)) / matrices for x in report.layers]
    assert report.speedup_now == pytest.approx((head + ffns) / (head + sum(now) * ffns / 2))
    if ffn["activation"] == "silu":
        assert report.speedup_now == 1.0


def test_the_table_says_what_it_does_not_promise():
    config, params = model(activation="silu")
    text = str(sparsity_report(config, params, np.arange(32).reshape(2, 16), BOUNDS))
    lines = text.splitlines()
    assert lines[0] == "32 tokens"
    assert lines[1].split() == [
        *("layer", "act", "zero", "|h|<0.01", "error", "FLOPs", "|h|<0.1", "error", "FLOPs")
    ]
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["0", "silu", "0.0%"],
        ["1", "silu", "0.0%"],
    ]
    assert lines[4].startswith("by FLOPs alone the sparse path gains 1.00x on the model as it is;")


def test_layers_without_a_feed_forward_part_are_left_out():
    config = presets.tiny("dense")
    layers = list(config.layers)
    layers[1] = LayerConfig(attention=layers[1].attention, ffn=None)
    config = config.replace(layers=tuple(layers))
    params = init_params(config, jax.random.key(1))
    report = sparsity_report(config, params, np.arange(24).reshape(2, 12))
    assert [x.layer for x in report.layers] == [0, 2, 3]
    # Attention and head stay: 128 x 272 of head, 4 x 128 x 128 per layer, 3 x 512 x 128 per FFN.
    dense = 128 * 272 + 4 * 4 * 128 * 128 + 3 * 3 * 512 * 128
    saved = sum(1 - x.flops[2] for x in report.layers) * 3 * 512 * 128
    assert report.model_speedup[2] == pytest.approx(dense / (dense - saved))


def test_arguments_that_do_not_fit():
    config, params = model()
    with pytest.raises(ValueError, match="thresholds must be positive, got"):
        sparsity_report(config, params, np.zeros((1, 4), np.int32), (0.1, 0.0))
    for first in (config.vocab_size, 2**32):
        with pytest.raises(ValueError, match="layer 0 reads is not finite: ids outside the vocab"):
            sparsity_report(config, params, np.array([[first, 1]]))
    empty = config.replace(layers=())
    with pytest.raises(ValueError, match="no feed-forward layer to report on"):
        sparsity_report(empty, {}, np.zeros((1, 4), np.int32))
