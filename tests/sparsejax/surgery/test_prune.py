"""Feed-forward parts removed and narrowed, against NumPy."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import param_shapes
from sparsejax.config import FFNConfig, LayerConfig
from sparsejax.params import flatten
from sparsejax.surgery import (
    PrunedLayer,
    PruneReport,
    channel_contribution,
    drop_dead_neurons,
    prune_ffn,
    remove_ffn,
)
from tests.sparsejax.surgery.test_attention import ATTENTION, TOKENS
from tests.sparsejax.surgery.test_attention import CONFIG as BASE
from tests.sparsejax.test_model import close, np_model, random_params

GATED = LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=30, gate_bias=True))
PLAIN = LayerConfig(attention=None, ffn=FFNConfig(d_ff=20, gated=False, activation="silu"))
CONFIG = BASE.replace(layers=(GATED, PLAIN, GATED))


def apply(config, params):
    with jax.default_matmul_precision("highest"):
        return sparsejax.apply(config, params, jnp.asarray(TOKENS))


def silenced(params, layer, neurons):
    """The model in which these neurons write nothing."""
    params = jax.tree.map(lambda x: x, params)
    ffn = params[f"layer_{layer}"]["ffn"]
    ffn["down"] = ffn["down"].at[np.asarray(neurons)].set(0.0)
    return params


def test_a_removed_ffn_adds_nothing():
    params = random_params(CONFIG)
    config, left = remove_ffn(CONFIG, params, [1, 0])
    assert config.layers == (
        dataclasses.replace(GATED, ffn=None),
        LayerConfig(attention=None, ffn=None),
        GATED,
    )
    assert "layer_1" not in left and not any("layer_0/ffn" in path for path in flatten(left))
    want = silenced(silenced(params, 0, range(30)), 1, range(20))
    close(apply(config, left), np_model(CONFIG, want, TOKENS)[0])


def test_given_neurons_stay_and_nothing_else():
    params = random_params(CONFIG)
    keep = {0: [7, 2, 29, 11], 1: np.array([19, 0, 3])}
    config, left, report = prune_ffn(CONFIG, params, [0, 1], keep=keep)
    assert report == PruneReport(
        layers=(
            PrunedLayer(layer=0, before=30, after=4, kept=(2, 7, 11, 29), score_kept=None),
            PrunedLayer(layer=1, before=20, after=3, kept=(0, 3, 19), score_kept=None),
        )
    )
    assert [layer.ffn.d_ff for layer in config.layers] == [4, 3, 30]
    for name, leaf in params["layer_0"]["ffn"].items():
        want = np.asarray(leaf)[[2, 7, 11, 29]]
        np.testing.assert_array_equal(left["layer_0"]["ffn"][name], want)
    assert left["layer_2"]["ffn"]["up"] is params["layer_2"]["ffn"]["up"]
    dropped = sorted(set(range(30)) - {2, 7, 11, 29})
    want = silenced(silenced(params, 0, dropped), 1, sorted(set(range(20)) - {0, 3, 19}))
    close(apply(config, left), np_model(CONFIG, want, TOKENS)[0])


@pytest.mark.parametrize(
    ("keep", "multiple", "width"),
    [
        (8, 1, 8),
        (9, 4, 12),
        (29, 16, 30),
        (np.int64(3), 8, 8),
        (0.5, 1, 15),
        (0.1, 1, 3),
        (1 / 3, 1, 10),
        (0.34, 1, 11),
        (0.34, 8, 16),
        (np.float32(0.5), 4, 16),
        (1.0, 16, 30),
        (1, 1, 1),
        (1e-9, 1, 1),
    ],
)
def test_the_highest_scores_stay(keep, multiple, width):
    scores = np.random.default_rng(2).permutation(30) + 1.0
    shapes = param_shapes(CONFIG)
    config, left, report = prune_ffn(CONFIG, shapes, 0, keep=keep, scores=scores, multiple=multiple)
    assert config.layers[0].ffn.d_ff == left["layer_0"]["ffn"]["up"].shape[0] == width
    (pruned,) = report.layers
    assert pruned.kept == tuple(np.flatnonzero(scores > 30 - width).tolist())
    best = sum(range(31 - width, 31))
    np.testing.assert_allclose(pruned.score_kept, best / (30 * 31 / 2))


def test_equal_scores_and_no_scores():
    scores = {0: np.zeros(30), 2: np.repeat([1.0, 2.0, 1.0], 10), 7: None}
    *_, report = prune_ffn(CONFIG, random_params(CONFIG), [2, 0], keep=12, scores=scores)
    assert [p.kept for p in report.layers] == [(0, 1, *range(10, 20)), tuple(range(12))]
    assert [p.score_kept for p in report.layers] == [22 / 40, 1.0]
    # On shapes alone a number says enough.
    config, _, report = prune_ffn(CONFIG, param_shapes(CONFIG), [0, 1], keep=0.5)
    assert [layer.ffn.d_ff for layer in config.layers] == [15, 10, 30]
    assert report.layers[1] == PrunedLayer(1, 20, 10, None, None)
    same, params, report = prune_ffn(CONFIG, p := random_params(CONFIG), 1, keep=1.0)
    assert same == CONFIG and params["layer_1"]["ffn"]["up"] is p["layer_1"]["ffn"]["up"]
    assert report.layers[0].kept == tuple(range(20))


def test_silent_neurons_by_their_contribution():
    """From scores to a narrower layer that computes the same."""
    params = silenced(random_params(CONFIG), 0, range(5, 25))
    scores = channel_contribution(CONFIG, params, [jnp.asarray(TOKENS)])
    config, left, report = prune_ffn(CONFIG, params, 0, keep=8, multiple=5, scores=scores)
    assert set(np.flatnonzero(scores[0])) <= set(report.layers[0].kept) - set(range(5, 25))
    assert report.layers[0].after == 10 > (scores[0] > 0).sum() > 5
    assert report.layers[0].score_kept == 1.0
    close(apply(config, left), np.asarray(apply(CONFIG, params), np.float64))


def test_dead_neurons_go_and_the_function_stays():
    params = random_params(CONFIG)
    for i in (0, 2):
        ffn = params[f"layer_{i}"]["ffn"]
        ffn["gate_bias"] = ffn["gate_bias"].at[jnp.array([3, 8, 20])].set(-100.0)
    want = np.asarray(apply(CONFIG, params), np.float64)
    tokens = [TOKENS[:1], TOKENS[1:]]
    config, left, report = drop_dead_neurons(CONFIG, params, tokens)
    assert [pruned.layer for pruned in report.layers] == [0, 2]  # SiLU is never silent
    for pruned in report.layers:
        assert not {3, 8, 20} & set(pruned.kept) and pruned.score_kept == 1.0
        assert pruned.after == config.layers[pruned.layer].ffn.d_ff <= 27
    close(apply(config, left), want)
    # All dead: some stay, and the width is a multiple.
    params["layer_0"]["ffn"]["gate_bias"] = jnp.full(30, -100.0)
    config, *_ = drop_dead_neurons(CONFIG, params, tokens, 0, multiple=4)
    assert [layer.ffn.d_ff for layer in config.layers] == [4, 20, 30]
    with pytest.raises(ValueError, match="drop_dead_neurons: layers names layer 3"):
        drop_dead_neurons(CONFIG, params, tokens, 3)


def test_under_jit():
    params = random_params(CONFIG)
    want = prune_ffn(CONFIG, params, 0, keep=[4, 9])[1]
    got = jax.jit(lambda p: prune_ffn(CONFIG, p, 0, keep=[4, 9])[1])(params)
    for path, leaf in flatten(got).items():
        np.testing.assert_array_equal(leaf, flatten(want)[path], err_msg=path)


def test_numbers_of_other_libraries():
    shapes = param_shapes(CONFIG)
    for keep, want in (
        (jnp.float32(0.5), 15),
        (np.array(0.5), 15),
        (np.array(7), 7),
        (jnp.array(7), 7),
        # As 0.1 would: float32's own value is a little more, and would round up to 4.
        (np.float32(0.1), 3),
        (jnp.bfloat16(0.1), 3),
        (np.array([4, 9]), 2),
    ):
        config, _, report = prune_ffn(CONFIG, shapes, np.array(0), keep=keep)  # pyright: ignore
        assert report.layers[0].after == want == config.layers[0].ffn.d_ff
        assert report.layers[0].layer == 0


def test_wrong_requests():
    params = random_params(CONFIG)
    good = np.ones(30)
    cases = {
        "keep must list one neuron of layer 0 or more, got shape [0]": {"keep": []},
        "keep must list neurons 0 to 29 of layer 0, got 30": {"keep": [1, 30]},
        "keep must list neurons 0 to 29 of layer 0, got -1": {"keep": [-1]},
        "keep lists neuron 4 of layer 0 more than once": {"keep": [4, 3, 4]},
        "as integers, got bool; of a mask take np.flatnonzero(mask)": {"keep": np.ones(30, bool)},
        "keep for layer 0 must hold numbers in equal rows, got [[1, 2], [3]]": {
            "keep": [[1, 2], [3]]
        },
        "a number or a fraction, got True": {"keep": np.True_},
        "scores of layer 0 must hold numbers in equal rows, got 'abc'": {
            "keep": 2,
            "scores": "abc",
        },
        "keep lists 3 neurons of layer 0, not a multiple of multiple = 2": {
            "keep": [1, 2, 3],
            "multiple": 2,
        },
        "keep for layer 0 must be a positive integer, got 0": {"keep": 0, "scores": good},
        "keep must be at most layer 0's d_ff = 30, got 31": {"keep": 31, "scores": good},
        "keep must be a fraction in (0, 1] or an integer, got 1.5": {"keep": 1.5},
        "keep must be a fraction in (0, 1] or an integer, got 0.0": {"keep": 0.0},
        "keep must be a fraction in (0, 1] or an integer, got nan": {"keep": float("nan")},
        "keep must be neurons, a number or a fraction, got True": {"keep": True},
        "keep must hold an entry for each of layers [0]; [0] are missing": {"keep": {1: 4}},
        "for each of layers [0]; [1] are not among them": {"keep": {0: 4, 1: 4}},
        "scores must say which 4 of layer 0's 30 neurons stay": {"keep": 4},
        "scores of layer 0 must have shape [30], got [29]": {"keep": 4, "scores": good[1:]},
        "scores of layer 0 must be finite, got nan for neuron 7": {
            "keep": 4,
            "scores": np.where(np.arange(30) == 7, np.nan, 1.0),
        },
        "multiple must be a positive integer, got 0": {"keep": 4, "multiple": 0},
    }
    for message, arguments in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            prune_ffn(CONFIG, params, 0, **arguments)
    with pytest.raises(ValueError, match=r"scores must be a dict of layers \[0, 2\], got ndarray"):
        prune_ffn(CONFIG, params, [0, 2], keep=4, scores=good)
