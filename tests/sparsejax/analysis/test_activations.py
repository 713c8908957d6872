"""Counts of active neurons against a NumPy model, and what is made of them."""

import csv
import json
import re

import jax
import numpy as np
import pytest

from sparsejax import MeshConfig, make_mesh, param_shapes
from sparsejax.analysis.activation_plot import plot_activations
from sparsejax.analysis.activations import ActivationStats, LayerActivations, activation_stats
from sparsejax.config import FFNConfig, LayerConfig
from sparsejax.params import flatten
from sparsejax.sharding import tree_shardings
from sparsejax.surgery import drop_dead_neurons
from tests.sparsejax.surgery.test_attention import ATTENTION, TOKENS
from tests.sparsejax.surgery.test_attention import CONFIG as BASE
from tests.sparsejax.test_model import np_model, random_params

GATED = LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=32, gate_bias=True))
SILU = LayerConfig(attention=None, ffn=FFNConfig(d_ff=20, activation="silu"))
PLAIN = LayerConfig(attention=None, ffn=FFNConfig(d_ff=24, gated=False))
PARALLEL = LayerConfig(attention=ATTENTION, ffn=None, parallel_with_previous=True)
CONFIG = BASE.replace(layers=(GATED, SILU, PARALLEL, PLAIN), dtype="float32")
SPARSE = {0: 0, 3: 2}  # layer -> its place among the layers with an FFN


def model():
    """Random parameters, of which layer 0 has three neurons that never fire."""
    params = random_params(CONFIG)
    ffn = params["layer_0"]["ffn"]
    ffn["gate_bias"] = ffn["gate_bias"].at[np.array([3, 8, 20])].set(-100.0)
    return params


def active(params, tokens, layer, segments=None):
    return np_model(CONFIG, params, tokens, segments)[1][SPARSE[layer]][1]


def run(params, batches, **kwargs):
    with jax.default_matmul_precision("highest"):
        return activation_stats(CONFIG, params, batches, **kwargs)


def test_counts_over_batches_written_out():
    params = model()
    first, second = TOKENS[:, :5], TOKENS[:1]
    stats = run(params, iter([first, second]))
    assert [layer.layer for layer in stats.layers] == [0, 3]
    assert stats.tokens == first.size + second.size
    for found in stats.layers:
        parts = [active(params, tokens, found.layer) for tokens in (first, second)]
        nnz = np.concatenate([p.sum(-1).ravel() for p in parts])
        fired = sum(p.sum((0, 1)) for p in parts)
        np.testing.assert_array_equal(found.fired, fired)
        np.testing.assert_array_equal(found.histogram, np.bincount(nnz, minlength=found.d_ff + 1))
        assert found.maximum == nnz.max()
        np.testing.assert_allclose(found.mean, nnz.mean(), rtol=1e-12)
        for q in (0.0, 0.1, 0.5, 0.9, 1.0):
            assert found.quantile(q) == np.quantile(nnz, q, method="inverted_cdf")
        positions = np.zeros(second.shape[1])
        positions[:5] += parts[0].sum(-1).sum(0)
        positions += parts[1].sum(-1)[0]
        people = np.where(np.arange(len(positions)) < 5, 3, 1)
        np.testing.assert_allclose(found.by_position, positions / people, rtol=1e-12)
        np.testing.assert_array_equal(found.dead, np.flatnonzero(fired == 0))
    assert {3, 8, 20} <= set(stats.of_layer(0).dead)


def test_masked_tokens_and_positions_of_documents():
    params = model()
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 2, 2]])
    positions = np.stack([np.arange(9) - np.searchsorted(row, row) for row in segments])
    mask = np.random.default_rng(1).random((2, 9)) < 0.6
    batch = {"tokens": TOKENS, "segment_ids": segments, "positions": positions, "loss_mask": mask}
    found = run(params, [batch], layers=[3]).of_layer(3)
    # Rotary attention sees differences of positions only: the NumPy model may count from 0.
    nnz = active(params, TOKENS, 3, segments).sum(-1)
    assert found.tokens == mask.sum()
    np.testing.assert_array_equal(found.histogram, np.bincount(nnz[mask], minlength=25))
    last = positions[mask].max()
    here = [nnz[mask & (positions == p)] for p in range(last + 1)]
    want = [found.mean() if found.size else np.nan for found in here]
    np.testing.assert_allclose(found.by_position, want, rtol=1e-12)


def test_on_a_mesh_the_same_counts():
    params = model()
    mesh = make_mesh(MeshConfig(1, 2, 4))
    # Attention's heads do not divide over 4: layers without it, from the same arrays.
    config = CONFIG.replace(layers=(SILU, PLAIN))
    small = {
        "embed": params["embed"],
        "final_norm": params["final_norm"],
        "layer_0": params["layer_1"],
        "layer_1": params["layer_3"],
    } | ({"lm_head": params["lm_head"]} if "lm_head" in params else {})
    with jax.default_matmul_precision("highest"):
        alone = activation_stats(config, small, [TOKENS])
        placed = jax.device_put(small, tree_shardings(mesh, small))
        shared = activation_stats(config, placed, [TOKENS])
    for a, b in zip(alone.layers, shared.layers, strict=True):
        for field in ("fired", "histogram", "position_sum"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
    assert alone.tokens == shared.tokens == TOKENS.size


def layer_of(fired, histogram):
    none = np.ones(1, np.int64)
    return LayerActivations(5, np.asarray(histogram), np.asarray(fired), none, none)


def test_rare_dead_and_hottest_neurons():
    # 1000 tokens; neuron 0 fires on all, 1 on 500, 2 on one (0.1 %: not rare), 3 on none.
    fired = np.array([1000, 500, 1, 0] + [0] * 196)
    found = layer_of(fired, np.bincount([1] * 499 + [2] * 501, minlength=201))
    assert found.tokens == 1000 and found.mean == 1.501
    assert found.dead.tolist() == found.rare.tolist() == list(range(3, 200))
    assert found.hottest(0.01) == 1500 / 1501  # two neurons of 200
    assert found.hottest(0.005) == 1000 / 1501
    assert found.quantile(0.499) == 1 and found.quantile(0.4991) == 2
    fired[2] = 0
    assert 2 in layer_of(fired, found.histogram).rare
    nothing = layer_of(np.zeros(4, int), [7, 0, 0, 0, 0])
    assert (nothing.mean, nothing.maximum, nothing.hottest(0.5)) == (0.0, 0, 0.0)
    with pytest.raises(ValueError, match="q must be in"):
        found.quantile(1.5)


def test_files(tmp_path):
    stats = run(model(), [TOKENS])
    text = stats.to_json(tmp_path / "stats.json")
    assert (tmp_path / "stats.json").read_text() == text
    again = ActivationStats.from_json(text)
    assert again.summary() == stats.summary() and again.tokens == stats.tokens
    for a, b in zip(stats.layers, again.layers, strict=True):
        np.testing.assert_array_equal(a.histogram, b.histogram)
        np.testing.assert_array_equal(a.by_position, b.by_position)
    stats.to_csv(tmp_path / "stats.csv")
    with (tmp_path / "stats.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == ["0", "3"]
    assert float(rows[0]["mean"]) == stats.of_layer(0).mean
    assert int(rows[1]["d_ff"]) == 24
    picture = plot_activations(stats, tmp_path / "stats.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    # No token at position 0: NaN here, null in JSON.
    late = {"tokens": TOKENS, "positions": np.arange(9) + np.ones((2, 1), int)}
    found = run(model(), [late], layers=0)
    assert np.isnan(found.of_layer(0).by_position[0])
    assert len(found.of_layer(0).by_position) == 10
    assert json.loads(found.to_json())["layers"][0]["first_position"] is None


def test_dead_neurons_go_by_the_statistics():
    params = model()
    stats = run(params, [TOKENS])
    config, left, report = drop_dead_neurons(CONFIG, params, stats)
    for pruned, layer in zip(report.layers, (0, 3), strict=True):
        alive = np.flatnonzero(active(params, TOKENS, layer).any((0, 1)))
        assert pruned.kept == tuple(alive)
    kept = sum(pruned.after for pruned in report.layers)
    np.testing.assert_allclose(report.work_removed, 1 - kept / (32 + 24))
    assert report.work_removed >= 3 / 56
    want, got = np_model(CONFIG, params, TOKENS)[0], np_model(config, left, TOKENS)[0]
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    # Statistics decide without the model's values.
    planned = drop_dead_neurons(CONFIG, param_shapes(CONFIG), stats, layers=0)[1]
    assert flatten(planned)["layer_0/ffn/up"].shape == (report.layers[0].after, CONFIG.d_model)
    with pytest.raises(ValueError, match=re.escape("cover layers [3], not layer 0")):
        drop_dead_neurons(CONFIG, params, run(params, [TOKENS], layers=3), layers=0)


def test_wrong_arguments():
    params = model()
    with pytest.raises(ValueError, match=re.escape("layer 1, which has no ReLU neurons")):
        run(params, [TOKENS], layers=[0, 1])
    with pytest.raises(ValueError, match="batches hold no tokens"):
        run(params, [])
    with pytest.raises(ValueError, match="batches must be an iterable of batches, got 5"):
        run(params, 5)
    with pytest.raises(ValueError, match="pre-activations of layer 0 are not finite: ids outside"):
        run(params, [TOKENS.astype(np.int64) + 2**32])
    with pytest.raises(ValueError, match="config must be a ModelConfig, got dict"):
        activation_stats(params, CONFIG, [TOKENS])  # pyright: ignore[reportArgumentType]
    params["layer_0"]["ffn"]["gate"] = params["layer_0"]["ffn"]["gate"].at[0, 0].set(np.nan)
    with pytest.raises(ValueError, match="pre-activations of layer 0 are not finite"):
        run(params, [TOKENS])
