"""Every token once, with the context that was promised."""

import importlib

import pytest

from sparsejax.evaluation.windows import Window, WindowPlan


@pytest.mark.parametrize("full_tail", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_every_token_is_scored_once_and_sees_enough(window, full_tail):
    for stride in range(1, window + 1):
        for num_tokens in range(1, 30):
            plan = WindowPlan(num_tokens, window, stride, full_tail)
            scored = []
            for start, first, stop in plan:
                assert 0 <= start <= first < stop <= num_tokens
                assert stop - start <= window
                if start:
                    assert first - start >= window - stride
                if full_tail and len(plan) > 1:
                    assert stop - start == window
                scored += range(first, stop)
            assert scored == list(range(num_tokens)), (num_tokens, window, stride)


def test_by_hand():
    assert list(WindowPlan(10, 4)) == [(0, 0, 4), (4, 4, 8), (8, 8, 10)]
    assert list(WindowPlan(10, 4, full_tail=True)) == [(0, 0, 4), (4, 4, 8), (6, 8, 10)]
    assert list(WindowPlan(7, 4, 2)) == [(0, 0, 4), (2, 4, 6), (4, 6, 7)]
    assert list(WindowPlan(3, 4, 1)) == [Window(0, 0, 3)]


def test_full_tails_are_those_of_the_harness():
    utils = pytest.importorskip("lm_eval.utils", reason="lm-evaluation-harness is not installed")
    assert importlib.import_module("lm_eval")
    for num_tokens in range(1, 40):
        ids = list(range(num_tokens))
        rolling = utils.get_rolling_token_windows(ids, -1, max_seq_len=7, context_len=1)
        want = [(seen, scored) for seen, scored in rolling]
        shifted = [-1, *ids]
        plan = WindowPlan(num_tokens, 7, full_tail=True)
        assert [(shifted[w.start : w.stop], ids[w.first : w.stop]) for w in plan] == want


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "there is no token to score"),
        ((5, 0), "window must be at least 1"),
        ((5, 4, 0), "stride must be in"),
        ((5, 4, 5), "would leave tokens out"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WindowPlan(*arguments)
    with pytest.raises(IndexError):
        WindowPlan(5, 4)[2]
