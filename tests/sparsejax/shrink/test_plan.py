"""Plans: targets kept by the fused model, the least loss for it, refusals."""

import itertools

import numpy as np
import pytest

from sparsejax.analysis import BlockScores, Choice, Dependency, cost
from sparsejax.shrink.plan import Fusing, make_plan, read_selection


@pytest.fixture(scope="module")
def model(model):
    """Shapes are all that a plan looks at: one layer more."""
    config, params = model
    return config.replace(layers=config.layers[:1] * 5), params


SETTING = {"device": "h200", "batch": 1, "context": 64}


def scores_of(attention_kl, widths=(32,), layers=5):
    """Attention costs what is said, narrow layers 1 nat."""
    kl = {
        i: {Choice(True, 32): 0.0, Choice(False, 32): attention_kl[i]}
        | {Choice(True, w): 1.0 for w in widths if w < 32}
        for i in range(layers)
    }
    contributions = {i: np.arange(32.0) for i in range(layers)}
    return BlockScores(kl, np.ones(layers), np.ones(layers), contributions, 10, 1.0)


SCORES = scores_of([5.0, 0.1, 0.2, 0.3, 4.0])


def fused_latency(config, removed, fuse=True):
    """By hand: attention-free runs but their last layer become one part each."""
    from sparsejax import param_shapes, surgery

    model, params = surgery.remove_attention(config, param_shapes(config), sorted(removed))
    runs, groups = [], []
    for i in sorted(removed):
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    groups = [run[:-1] for run in runs if len(run) > 2] if fuse else []
    return cost.estimate(surgery.fuse_ffns(model, params, groups)[0], **SETTING).latency


@pytest.mark.parametrize("target", [0.95, 0.8, 0.67, 0.6])
def test_the_cheapest_removal_whose_fused_form_is_fast_enough(model, target):
    config, _ = model
    whole = cost.estimate(config, **SETTING).latency
    plan = make_plan(config, SCORES, {"latency": target}, **SETTING)
    assert plan.ratios["latency"] <= target
    np.testing.assert_allclose(
        cost.estimate(plan.config, **SETTING).latency / whole, plan.ratios["latency"], rtol=1e-12
    )
    kl = [0.0] * 5
    for i in range(5):
        kl[i] = SCORES.kl[i][Choice(False, 32)]
    best = min(
        sum(kl[i] for i in removed)
        for n in range(6)
        for removed in itertools.combinations(range(5), n)
        if fused_latency(config, removed) <= target * whole
    )
    np.testing.assert_allclose(plan.selection.score, best, rtol=1e-9)


def test_a_target_that_only_fusing_reaches(model):
    config, _ = model
    whole, everything = fused_latency(config, ()), range(5)
    alone, fused = (fused_latency(config, everything, fuse=f) / whole for f in (False, True))
    assert fused < alone
    plan = make_plan(config, SCORES, {"latency": (fused + alone) / 2}, **SETTING)
    assert plan.groups == ((0, 1, 2, 3),)
    np.testing.assert_allclose(plan.ratios["latency"], fused, rtol=1e-12)
    message = rf"is {alone:.3f} of the model's own, and {fused:.3f} after fusing; 0.1 was asked"
    with pytest.raises(ValueError, match=message):
        make_plan(config, SCORES, {"latency": 0.1}, **SETTING)


def test_fusing_spares_layers(model):
    config, _ = model
    target = fused_latency(config, {1, 2, 3}) / fused_latency(config, ()) + 1e-9
    fused = make_plan(config, SCORES, {"latency": target}, **SETTING)
    assert fused.groups == ((1, 2),)
    assert fused.layer_map == (0, 2, 3, 4)
    assert [x.ffn.d_ff for x in fused.config.layers] == [32, 64, 32, 32]
    plain = make_plan(config, SCORES, {"latency": target}, fusing=Fusing(fuse=False), **SETTING)
    assert plain.groups == () and plain.config.num_layers == 5
    assert plain.selection.score > fused.selection.score


def test_other_targets_and_several_at_once(model):
    config, _ = model
    plan = make_plan(config, SCORES, {"kv_cache": 0.4, "latency": 0.95}, **SETTING)
    assert len(plan.config.attention_layers) == 2
    assert plan.ratios["kv_cache"] == pytest.approx(0.4)
    narrow = scores_of([9.0] * 5, widths=(32, 16))
    plan = make_plan(config, narrow, {"parameters": 0.9}, **SETTING)
    assert plan.ratios["parameters"] <= 0.9
    assert plan.layer_map == (0, 1, 2, 3, 4)


def test_a_threshold_keeps_dependent_layers_apart(model):
    config, _ = model
    matrix = np.full((5, 5), 0.5)
    dependency = Dependency(matrix, np.zeros((5, 5), np.int64), 10, "block", 1.0)
    for threshold, groups in ((0.6, ((1, 2),)), (0.4, ())):
        plan = make_plan(
            config,
            SCORES,
            {"kv_cache": 0.4},
            dependency=dependency,
            fusing=Fusing(fuse_threshold=threshold),
            **SETTING,
        )
        assert plan.groups == groups
    last = make_plan(config, SCORES, {"kv_cache": 0.4}, fusing=Fusing(fuse_last=True), **SETTING)
    assert last.groups == ((1, 2, 3),)


def test_a_plan_goes_through_json(model):
    import json

    config, _ = model
    plan = make_plan(config, SCORES, {"kv_cache": 0.4}, **SETTING)
    told = json.loads(json.dumps(plan.to_dict()))
    assert read_selection(told["choices"], SCORES).choices == plan.selection.choices
    assert told["layer_map"] == list(plan.layer_map)


@pytest.mark.parametrize(
    ("targets", "fusing", "message"),
    [
        ({}, Fusing(), "got none at all"),
        ({"speed": 0.5}, Fusing(), r"one or more of .* got \['speed'\]"),
        ({"latency": 1.5}, Fusing(), r"share in \(0, 1\], got 1.5"),
        ({"latency": 0.01}, Fusing(), "limits cannot be kept: with every layer at its cheapest"),
        ({"latency": 0.9}, Fusing(fuse_threshold=0.1), "needs the dependency matrix"),
    ],
)
def test_wrong_requests(model, targets, fusing, message):
    with pytest.raises(ValueError, match=message):
        make_plan(model[0], SCORES, targets, fusing=fusing, **SETTING)
