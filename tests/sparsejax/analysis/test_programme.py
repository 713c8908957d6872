"""Scores that forbid a choice beside small ones, against brute force in float64."""

import itertools
import math
import re

import numpy as np
import pytest

from sparsejax.analysis import Choice, cost, select_architecture

GRID = [Choice(a, f) for a in (True, False) for f in (8, 4, 0)]


def forbidding(kind, rng, base):
    """What a user writes who means never."""
    return {
        "any": 10 ** rng.uniform(6, 30),
        "one": base,
        "added": base + rng.random(),
        "close": base * (1 + 1e-9 * rng.integers(0, 3)),
        "infinite": math.inf,
    }[kind]


def problem(kind, share, seed, layers=4):
    rng = np.random.default_rng(seed)
    base = 10.0 ** rng.integers(6, 31)
    scores = {
        i: {
            c: forbidding(kind, rng, base)
            if rng.random() < share
            else float(10 ** rng.uniform(-3, 0))
            for c in GRID
        }
        for i in range(layers)
    }
    tables = {
        name: {i: {c: float(rng.integers(1, 20)) for c in GRID} for i in range(layers)}
        for name in ("latency", "memory")
    }
    costs = cost.LayerCosts({"latency": 1.0, "memory": 3.0}, tables)
    limits = {
        name: costs.fixed[name] + layers * rng.uniform(3, 9)
        for name in tables
        if rng.random() < 0.8
    }
    return scores, costs, limits


def brute_force(scores, costs, limits):
    best = math.inf
    for choices in itertools.product(GRID, repeat=len(scores)):
        if all(costs.total(name, choices) <= limit for name, limit in limits.items()):
            best = min(best, math.fsum(scores[i][c] for i, c in enumerate(choices)))
    return best


@pytest.mark.parametrize("kind", ["any", "one", "added", "close", "infinite"])
def test_equal_to_brute_force(kind):
    """Where few choices are forbidden, and where every solution has to take some of them."""
    finite = forced = refused = 0
    for seed in range(24):
        scores, costs, limits = problem(kind, (0.2, 0.5, 0.7)[seed % 3], seed)
        want = brute_force(scores, costs, limits)
        if want == math.inf:
            refused += 1
            with pytest.raises(ValueError, match="limit"):
                select_architecture(scores, costs, limits)
            continue
        finite += want < 1e5
        forced += want > 1e5
        got = select_architecture(scores, costs, limits)
        assert got.score == pytest.approx(want, rel=1e-12, abs=0), seed
        assert all(costs.total(n, got.choices) <= most for n, most in limits.items())
    assert finite > 3 and refused > 3 and (forced > 3 or kind == "infinite")


@pytest.mark.parametrize("huge", [1e10, 1e30, 1e300, math.inf])
def test_a_forbidden_choice_does_not_drown_the_others(huge):
    a, b, c = Choice(True, 8), Choice(False, 8), Choice(True, 4)
    scores = {0: {a: 0.0, b: 0.002, c: 0.005}, 1: {a: 0.0, b: huge}}
    values = {0: {a: 10.0, b: 5.0, c: 5.0}, 1: {a: 10.0, b: 5.0}}
    costs = cost.LayerCosts({"latency": 0.0}, {"latency": values})
    for limit, choices, score in ((20.0, (a, a), 0.0), (15.0, (b, a), 0.002)):
        got = select_architecture(scores, costs, {"latency": limit}, combine=False)
        assert got.choices == choices and got.score == score
    if huge < math.inf:
        got = select_architecture(scores, costs, {"latency": 10.0}, combine=False)
        assert got.choices == (b, b) and got.score == huge + 0.002
    else:
        told = "latency is at least 15 with every layer at its cheapest, 5 (50.0%) over the limit"
        with pytest.raises(ValueError, match=re.escape(told)):
            select_architecture(scores, costs, {"latency": 10.0}, combine=False)
        told = "every score of layer 1 is infinite, which means never"
        with pytest.raises(ValueError, match=told):
            select_architecture({**scores, 1: {b: math.inf}}, costs, {})


def test_what_cannot_be_paid_does_not_drown_the_limit():
    """Costs of 1e30, which no limit has room for, beside costs of 1 to 19."""
    for seed in range(6):
        scores, costs, _ = problem("one", 0.0, seed)
        rng = np.random.default_rng(seed)
        for table in costs.layers["latency"].values():
            table |= {c: 1e30 for c in GRID[1:] if rng.random() < 0.3}
        limits = {"latency": 1.0 + 4 * 6.0}
        want = brute_force(scores, costs, limits)
        got = select_architecture(scores, costs, limits)
        assert got.score == pytest.approx(want, rel=1e-12)


def test_sums_of_pairs_with_a_forbidden_part_are_not_offered():
    whole, no_attention, half = Choice(True, 8), Choice(False, 8), Choice(True, 4)
    scores = {0: {whole: 0.0, no_attention: math.inf, half: 1.0}}
    values = {c: float(c.d_ff + 4 * c.attention) for c in (*scores[0], Choice(False, 4))}
    costs = cost.LayerCosts({"latency": 0.0}, {"latency": {0: values}})
    assert select_architecture(scores, costs, {"latency": 8.0}).choices == (half,)
    with pytest.raises(ValueError, match="latency is at least 8 with every layer at its cheapest"):
        select_architecture(scores, costs, {"latency": 7.0})
