"""Groups and windows against literal readings of the rules, and wrong requests."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from sparsejax import param_shapes, presets, surgery
from sparsejax.analysis import Dependency, fusion_groups, parallel_windows
from sparsejax.analysis.cost import ffn_bytes
from sparsejax.config import FFNConfig, LayerConfig
from tests.sparsejax.analysis.test_cost import GROUPS, nemotron
from tests.sparsejax.test_model import EMPTY, FULL, NO_ATTENTION, ODD, parallel

WIDE = LayerConfig(attention=None, ffn=FFNConfig(d_ff=40, gated=False))
GATED = LayerConfig(attention=None, ffn=FFNConfig(d_ff=40))
F, N, W, G, E = FULL, NO_ATTENTION, WIDE, GATED, EMPTY


def model(*layers):
    return ODD.replace(layers=layers)


def dependency(matrix, part="block"):
    return Dependency(matrix, np.zeros(matrix.shape, int), 1, part, 1.0)


@pytest.mark.parametrize(
    ("layers", "want"),
    [
        ((F, N, N, N, F, N, N, F), [(1, 2)]),
        ((N, N, N, N), [(0, 1, 2)]),
        ((N, N, F, F), []),  # two layers, of which the last stays out
        ((F, F), []),
        ((), []),
        ((N,), []),
        # Layers that add nothing are neither counted nor at an end.
        ((N, E, N, E, N, E, F), [(0, 1, 2)]),
        ((F, E, N, E, E, F), []),
        ((E, E, E), []),
        # Of one kind each.
        ((N, N, N, G, G, G), [(0, 1), (3, 4)]),
        ((N, W, N, W), [(0, 1, 2)]),
        ((N, E, G, G, G), [(2, 3)]),
    ],
)
def test_attention_free_runs(layers, want):
    config = model(*layers)
    got = fusion_groups(config)
    assert got == want
    if got:
        surgery.fuse_ffns(config, param_shapes(config), got)


def test_the_last_layer_may_be_taken_along():
    assert fusion_groups(model(F, N, N, F, N, N, N), keep_last=False) == [(1, 2), (4, 5, 6)]
    assert fusion_groups(model(N, E, N, E), keep_last=False) == [(0, 1, 2)]


def test_the_published_groups():
    before, _ = nemotron()
    assert fusion_groups(before)[-1] == tuple(range(66, 115))
    # With one width per layer, a bound of the largest published group's size gives four groups too.
    bound = 15 * ffn_bytes(before, 70, tensor=8)
    groups = [g for g in fusion_groups(before, max_bytes=bound, tensor=8) if g[0] >= 66]
    assert len(groups) == len(GROUPS) and groups[0][0] == 66 and groups[-1][-1] == 114


def fewest(items, fits):
    """The fewest consecutive pieces that fit, by trying all cuts; pieces of one always do."""
    for cuts in range(len(items)):
        for where in itertools.combinations(range(1, len(items)), cuts):
            ends = [0, *where, len(items)]
            pieces = [items[a:b] for a, b in itertools.pairwise(ends)]
            if all(len(piece) == 1 or fits(piece) for piece in pieces):
                return cuts + 1
    raise AssertionError


@pytest.mark.parametrize("seed", range(20))
def test_cuts_keep_to_bounds_and_are_fewest(seed):
    rng = np.random.default_rng(seed)
    layers = [
        dataclasses.replace(W, ffn=FFNConfig(d_ff=int(f), gated=False))
        for f in rng.integers(5, 40, 9)
    ]
    config = model(F, *layers)
    matrix = np.triu(rng.random((10, 10)), 1)
    matrix[np.tril_indices(10)] = np.nan
    tensor = int(rng.integers(1, 3))
    bound = float(rng.uniform(1.0, 3.0)) * max(ffn_bytes(config, i) for i in range(1, 10)) / tensor
    threshold = float(rng.uniform(0.5, 1.0))

    def fits(piece):
        size = sum(4 * (24 + 2 * config.layers[i].ffn.d_ff * 24) for i in piece)
        close = all(matrix[i, j] <= threshold for i, j in itertools.combinations(piece, 2))
        return size / tensor <= bound and close

    got = fusion_groups(
        config, dependency(matrix), threshold=threshold, max_bytes=bound, tensor=tensor
    )
    assert all(fits(group) and len(group) > 1 for group in got)
    alone = 8 - sum(len(group) for group in got)
    assert len(got) + alone == fewest(list(range(1, 9)), fits)
    assert 9 not in itertools.chain(*got)


def test_thresholds():
    config = model(*[N] * 5)
    matrix = np.full((5, 5), np.nan)
    matrix[np.triu_indices(5, 1)] = 0.1
    matrix[1, 2] = 0.3
    both = (matrix, dependency(matrix, "ffn"))
    for given in both:
        assert fusion_groups(config, given, threshold=0.3) == [(0, 1, 2, 3)]
        assert fusion_groups(config, given, threshold=0.2) == [(0, 1), (2, 3)]
        assert fusion_groups(config, given, threshold=0.05) == []
    # What was not measured is not independent; layers that add nothing are.
    unknown = matrix.copy()
    unknown[0, 1] = np.nan
    assert fusion_groups(config, unknown, threshold=0.2) == [(2, 3)]
    hollow = model(N, E, N, N)
    assert fusion_groups(
        hollow,
        np.where(matrix > 0, 0.1, np.nan)[:4, :4]
        * np.array([[1, np.nan, 1, 1], [np.nan] * 4, [1, np.nan, 1, 1], [1] * 4]),
        threshold=0.2,
    ) == [(0, 1, 2)]


def literal_windows(matrix, config, length):
    """The published rule, step by step."""
    entries = {}
    for start in range(config.num_layers - length + 1):
        window = range(start, start + length)
        if all(config.layers[i].attention is not None for i in window):
            pairs = [matrix[i, j] for i, j in itertools.combinations(window, 2)]
            entries[start] = (max(pairs), sum(pairs))
    chosen = []
    while entries:
        least = min(peak for peak, _ in entries.values())
        tied = {s: total for s, (peak, total) in entries.items() if peak == least}
        best = min(tied, key=lambda s: tied[s])
        chosen.append(tuple(range(best, best + length)))
        entries = {
            s: e for s, e in entries.items() if not set(chosen[-1]) & {*range(s, s + length)}
        }
    return chosen


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("length", [2, 3, 4])
def test_windows_by_the_published_rule(seed, length):
    rng = np.random.default_rng(seed)
    config = model(*[N if rng.random() < 0.1 else F for _ in range(16)])
    # Few distinct values, so that ties come.
    matrix = np.triu(rng.integers(1, 9, (16, 16)) / 8, 1)
    want = literal_windows(matrix, config, length)
    assert parallel_windows(dependency(matrix), config, length) == want
    assert parallel_windows(matrix, config, length, count=2) == want[:2]
    surgery.parallelize_blocks(config, param_shapes(config), want)


def test_windows_leave_alone_what_is_parallel_or_unknown():
    matrix = np.triu(np.ones((6, 6)), 1)
    assert parallel_windows(matrix, model(*[F] * 6), 2) == [(0, 1), (2, 3), (4, 5)]
    config = model(F, F, parallel(F), F, F, F)
    assert parallel_windows(matrix, config, 2) == [(3, 4)]
    matrix[3, 4] = np.nan
    assert parallel_windows(matrix, config, 2) == [(4, 5)]
    assert parallel_windows(matrix[:3, :3], model(F, F, F)) == []


def test_wrong_requests():
    config = model(F, N, N, N)
    matrix = np.zeros((4, 4))
    for args, kwargs, message in (
        ((matrix,), {}, "dependency and threshold go together"),
        ((), {"threshold": 0.1}, "dependency and threshold go together"),
        (
            (matrix[:3, :3],),
            {"threshold": 0.1},
            "shape [4, 4] for this model's 4 layers, got [3, 3]",
        ),
        ((matrix,), {"threshold": -1.0}, "threshold must be a distance from 0 on, got -1.0"),
        ((matrix,), {"threshold": float("nan")}, "threshold must be a distance"),
        ((dependency(matrix, "attention"),), {"threshold": 0.1}, "part='block' or 'ffn'"),
        ((), {"tensor": 0}, "tensor must be a positive integer, got 0"),
        # 2 x 25 x 24 numbers and a norm.
        ((), {"max_bytes": 4895}, "max_bytes = 4895 is less than the smallest feed-forward part"),
        ((), {"max_bytes": 2447, "tensor": 2}, "2448 bytes in layer 1 on each of 2 devices"),
        ((), {"max_bytes": float("nan")}, "max_bytes must be a number of bytes, or None, got nan"),
        ((), {"max_bytes": "x"}, "max_bytes must be a number of bytes, or None, got 'x'"),
        (("x",), {"threshold": 0.1}, "dependency must hold numbers in equal rows, got 'x'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            fusion_groups(config, *args, **kwargs)
        assert str(caught.value).startswith("fusion_groups: ")
    # Enough for each layer and not for two: nothing to fuse.
    assert fusion_groups(config, max_bytes=4896) == []
    for kwargs, message in (
        ({"length": 1}, "length must be an integer from 2 on, got 1"),
        ({"count": 0}, "count must be a positive integer, got 0"),
        ({"length": 2.0}, "length must be an integer from 2 on, got 2.0"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            parallel_windows(matrix, config, **kwargs)
    with pytest.raises(ValueError, match="must be of whole blocks, part='block', got 'ffn'"):
        parallel_windows(dependency(matrix, "ffn"), config)


def test_groups_of_presets_without_attention_to_remove():
    assert fusion_groups(presets.tiny()) == []
