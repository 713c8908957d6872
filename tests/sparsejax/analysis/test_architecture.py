"""The integer programme against brute force and dynamic programming; what it refuses."""

import functools
import itertools
import math
import re

import jax
import numpy as np
import pytest

from sparsejax import MeshConfig, check_params, make_mesh, param_shapes, presets, surgery
from sparsejax.analysis import (
    NO_ATTENTION,
    NO_FFN,
    BlockScores,
    Choice,
    Variant,
    apply_selection,
    block_scores,
    cost,
    select_architecture,
)
from sparsejax.params import flatten
from sparsejax.sharding import tree_shardings
from tests.sparsejax.analysis.test_dependency import BATCHES, CONFIG
from tests.sparsejax.test_model import random_params

GRID = [Choice(a, f) for a in (True, False) for f in (8, 4, 0)]


def problem(seed, layers=4, spread=6):
    """Scores over `spread` orders of magnitude, three costs; limits come later."""
    rng = np.random.default_rng(seed)
    scores = {
        i: {
            c: 0.0 if c == GRID[0] else float(10 ** rng.uniform(-spread / 2, spread / 2))
            for c in GRID
        }
        for i in range(layers)
    }
    names = {"latency": 1e-5, "memory": 1e11, "parameters": 1.0}
    tables = {
        name: {i: {c: float(unit * rng.integers(1, 50)) for c in GRID} for i in range(layers)}
        for name, unit in names.items()
    }
    fixed = {"latency": 3e-5, "memory": 2e11, "parameters": 7.0}
    return scores, cost.LayerCosts(fixed, tables)


def brute_force(scores, costs, limits):
    best, at = math.inf, None
    for choices in itertools.product(*(scores[i] for i in scores)):
        if all(costs.total(name, choices) <= limit for name, limit in limits.items()):
            score = math.fsum(scores[i][c] for i, c in enumerate(choices))
            if score < best:
                best, at = score, choices
    return best, at


@pytest.mark.parametrize("seed", range(25))
def test_equal_to_brute_force(seed):
    scores, costs = problem(seed)
    rng = np.random.default_rng(1000 + seed)
    # Limits that some choice meets exactly, so that they bind.
    some = [list(scores[i])[rng.integers(len(GRID))] for i in range(4)]
    names = [n for n in costs.layers if rng.random() < 0.7] or ["latency"]
    limits = {name: costs.total(name, some) for name in names}
    want, _ = brute_force(scores, costs, limits)
    got = select_architecture(scores, costs, limits)
    assert got.score == pytest.approx(want, rel=1e-12)
    assert got.score == math.fsum(scores[i][c] for i, c in enumerate(got.choices))
    for name in costs.layers:
        assert got.totals[name] == costs.total(name, got.choices)
    assert all(got.totals[name] <= limit for name, limit in limits.items())
    assert got.added == () and got.limits == limits


def test_equal_to_dynamic_programming_on_many_layers():
    scores, costs = problem(7, layers=60, spread=4)
    units = {
        i: {c: round(v / 1e-5) for c, v in t.items()} for i, t in costs.layers["latency"].items()
    }
    budget = 60 * 14
    best = np.full(budget + 1, np.inf)
    best[:] = 0.0
    for i in range(60):
        following = np.full(budget + 1, np.inf)
        for choice, used in units[i].items():
            if used <= budget:
                shifted = np.full(budget + 1, np.inf)
                shifted[used:] = best[: budget + 1 - used] + scores[i][choice]
                following = np.minimum(following, shifted)
        best = following
    # Half a unit of room, because decimal fractions do not add up exactly.
    got = select_architecture(scores, costs, {"latency": 3e-5 + (budget + 0.5) * 1e-5})
    assert got.score == pytest.approx(best[budget], rel=1e-9)
    assert best[budget] > 0


def test_layers_that_are_alike():
    """Many equal layers have many equal solutions; with one cost the best is a matter of counts."""
    values = dict(zip(GRID, (9.0, 7.0, 5.0, 8.0, 4.0, 2.0), strict=True))
    losses = dict(zip(GRID, (0.0, 3.0, 4.0, 1.0, 6.0, 11.0), strict=True))
    m, limit = 90, 611.0
    costs = cost.LayerCosts({"latency": 0.0}, {"latency": dict.fromkeys(range(m), values)})
    got = select_architecture(dict.fromkeys(range(m), losses), costs, {"latency": limit})
    # Any total of 2 m to 9 m is reached; by dynamic programming over the total.
    best = {0: 0.0}
    for _ in range(m):
        following: dict[int, float] = {}
        for total, score in best.items():
            for choice in GRID:
                at = total + int(values[choice])
                following[at] = min(following.get(at, math.inf), score + losses[choice])
        best = following
    assert got.score == min(score for total, score in best.items() if total <= limit)
    assert got.totals["latency"] <= limit and len(got.choices) == m


def test_a_limit_is_kept_to_the_last_digit():
    scores, costs = problem(3)
    want, at = brute_force(scores, costs, {"memory": 2e13})
    total = costs.total("memory", at)
    assert select_architecture(scores, costs, {"memory": total}).choices == at
    less = select_architecture(scores, costs, {"memory": math.nextafter(total, 0)})
    assert less.choices != at and less.score >= want and less.totals["memory"] < total


def test_no_limits_keep_the_model():
    scores, costs = problem(0)
    for limits in ({}, {"latency": math.inf}):
        got = select_architecture(scores, costs, limits)
        assert got.score == 0 and got.choices == (GRID[0],) * 4


def test_pairs_not_scored_together_count_as_sums():
    whole, no_attention, half, both = (
        Choice(True, 8),
        Choice(False, 8),
        Choice(True, 4),
        Choice(False, 4),
    )
    scores = {0: {whole: 0.0, no_attention: 1.0, half: 0.25}, 1: {whole: 0.0, half: 5.0}}
    values = {whole: 4.0, no_attention: 3.0, half: 3.0, both: 2.0}
    costs = cost.LayerCosts({"latency": 0.0}, {"latency": {0: values, 1: values}})
    got = select_architecture(scores, costs, {"latency": 6.0})
    assert got.choices == (both, whole) and got.score == 1.25 and got.added == (0,)
    got = select_architecture(scores, costs, {"latency": 6.0}, combine=False)
    assert got.choices == (half, half) and got.score == 5.25 and got.added == ()
    # One that was scored together keeps its own score.
    scores[0][both] = 7.0
    got = select_architecture(scores, costs, {"latency": 6.0})
    assert got.choices == (half, half) and got.added == ()


def test_limits_that_cannot_be_kept_are_named():
    scores, costs = problem(5)
    cheapest = {
        name: costs.fixed[name] + sum(min(table[i].values()) for i in range(4))
        for name, table in costs.layers.items()
    }
    with pytest.raises(ValueError, match="limits cannot be kept") as caught:
        select_architecture(
            scores, costs, {"latency": 0.8 * cheapest["latency"], "memory": 1e15, "parameters": 0}
        )
    text = str(caught.value)
    over = cheapest["latency"] * 0.2
    assert f"latency is at least {cheapest['latency']:.6g} with every layer at its cheapest" in text
    assert f"{over:.3g} (25.0%) over the limit of {0.8 * cheapest['latency']:.6g}" in text
    assert f"parameters is at least {cheapest['parameters']:.6g}" in text and "memory" not in text
    # Each alone, but not both: as much as brute force says.
    limits = {"latency": 1.05 * cheapest["latency"], "memory": 1.05 * cheapest["memory"]}
    grid = list(itertools.product(GRID, repeat=4))
    least = {}
    for name, other in (("latency", "memory"), ("memory", "latency")):
        fits = [c for c in grid if costs.total(other, c) <= limits[other]]
        least[name] = min(costs.total(name, c) for c in fits)
        assert least[name] > limits[name]
    with pytest.raises(ValueError, match="each limit can be kept by itself") as caught:
        select_architecture(scores, costs, limits)
    for name, value in least.items():
        told = f"{name} is at least {value:.6g}, {value - limits[name]:.3g}"
        assert f"with the others kept, {told}" in str(caught.value)


def test_wrong_requests():
    scores, costs = problem(0)
    for limits, message in (
        ({"speed": 1.0}, "limits names 'speed', and costs are known of ['latency', 'memory'"),
        ({"latency": math.nan}, "limits['latency'] must be a number, got nan"),
        ({"latency": "x"}, "limits['latency'] must be a number, got 'x'"),
        (["latency"], "limits must be a dict of {name: most}, got ['latency']"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            select_architecture(scores, costs, limits)
    with pytest.raises(ValueError, match=re.escape("score of layer 1 as Choice(attention=True")):
        select_architecture({**scores, 1: {GRID[0]: math.nan}}, costs, {})
    with pytest.raises(ValueError, match="scores offer nothing for layer 1"):
        select_architecture({**scores, 1: {}}, costs, {})
    with pytest.raises(ValueError, match=r"keys 0, 1, \.\.\. for the layers in order"):
        select_architecture({1: scores[0]}, costs, {})
    for wrong, message in (
        ({"a": 1.0}, "scores of layer 0 must have keys Choice(attention, d_ff), got 'a'"),
        ({(True, 0.5): 1.0}, "d_ff in scores of layer 0 must be an integer from 0 on, got 0.5"),
        ({GRID[0]: "x"}, "must be a number, or infinity for never, got 'x'"),
        ({GRID[0]: -math.inf}, "must lie within 1e300, or be infinite for never, got -inf"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            select_architecture({0: wrong}, costs, {})  # pyright: ignore[reportArgumentType]
    del costs.layers["memory"][2][GRID[3]]
    with pytest.raises(ValueError, match=re.escape("costs.layers['memory'][2] must hold a finite")):
        select_architecture(scores, costs, {"memory": 1e15})
    # Costs that are not limited may be missing.
    assert "memory" not in select_architecture({**scores, 2: {GRID[3]: 0.0}}, costs, {}).totals


@functools.cache
def selected():
    params = random_params(CONFIG)
    scores = block_scores(CONFIG, params, BATCHES, (NO_ATTENTION, NO_FFN, Variant(ffn=0.5)))
    costs = cost.layer_costs(CONFIG, scores.choices(), batch=8, context=64)
    now = cost.estimate(CONFIG, batch=8, context=64)
    limits = {"parameters": 0.8 * now.parameters, "kv_cache": 0.6 * now.kv_cache}
    return params, scores, select_architecture(scores, costs, limits), limits


def test_from_scores_to_a_model():
    params, scores, selection, limits = selected()
    config, new = apply_selection(CONFIG, params, selection)
    check_params(config, new)
    got = cost.estimate(config, batch=8, context=64)
    for name, limit in limits.items():
        assert getattr(got, name) == pytest.approx(selection.totals[name]) and got.kv_cache
        assert getattr(got, name) <= limit
    kinds = {
        (layer.attention is not None, layer.ffn.d_ff if layer.ffn else 0): i
        for i, layer in enumerate(config.layers)
    }
    assert len(kinds) > 3
    for i, (choice, layer) in enumerate(zip(selection.choices, config.layers, strict=True)):
        assert choice == (layer.attention is not None, layer.ffn.d_ff if layer.ffn else 0)
        assert layer.parallel_with_previous == CONFIG.layers[i].parallel_with_previous
        old = CONFIG.layers[i].ffn
        if old and 0 < choice.d_ff < old.d_ff:
            order = np.sort(np.argsort(-scores.contributions[i], kind="stable")[: choice.d_ff])
            down = np.asarray(params[f"layer_{i}"]["ffn"]["down"])
            np.testing.assert_array_equal(new[f"layer_{i}"]["ffn"]["down"], down[order])
    # The same on shapes alone.
    planned = apply_selection(CONFIG, param_shapes(CONFIG), selection)
    assert planned[0] == config and planned[1] == param_shapes(config)


def test_on_a_mesh():
    config = presets.tiny()
    params = random_params(config)
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    spread = jax.device_put(params, tree_shardings(mesh, params))
    contributions = {i: np.arange(512.0) for i in range(4)}
    choices = (Choice(False, 512), Choice(True, 128), Choice(True, 0), Choice(True, 512))
    kl = {i: {Choice(True, 512): 0.0, c: 0.0} for i, c in enumerate(choices)}
    scores = BlockScores(kl, np.zeros(4), np.zeros(4), contributions, 1, 1.0)
    costs = cost.layer_costs(config, scores.choices())
    limit = cost.estimate(config).parameters - 4 * 128 * 128 - 384 * 3 * 128 - 512 * 3 * 128
    selection = select_architecture(scores, costs, {"parameters": limit - 1}, combine=False)
    assert selection.choices == choices
    one, many = (
        apply_selection(config, params, selection),
        apply_selection(config, spread, selection),
    )
    assert one[0] == many[0]
    for path, leaf in flatten(many[1]).items():
        np.testing.assert_array_equal(leaf, flatten(one[1])[path])
        assert leaf.sharding.mesh.size == 8


def test_selections_for_other_models_are_refused():
    params, _, selection, _ = selected()
    shorter = CONFIG.replace(layers=CONFIG.layers[:6])
    with pytest.raises(ValueError, match="selection is for 7 layers, and the model has 6"):
        apply_selection(shorter, param_shapes(shorter), selection)
    # The same without what says which neurons stay.
    free = {i: {choice: 0.0} for i, choice in enumerate(selection.choices)}
    whole = select_architecture(free, cost.LayerCosts({}, {}), {})
    assert whole.choices == selection.choices and whole.contributions is None
    bare = surgery.remove_attention(CONFIG, param_shapes(CONFIG), [0, 1, 4, 5, 6])
    kept = next(i for i, choice in enumerate(selection.choices) if choice.attention)
    with pytest.raises(ValueError, match=rf"layer {kept} is .* and cannot become"):
        apply_selection(*bare, whole)
    with pytest.raises(ValueError, match="scores must say which"):
        apply_selection(CONFIG, params, whole)
