"""Scores of pairs against one uncached row at a time; where texts are cut into two."""

import dataclasses

import jax
import numpy as np
import pytest

from sparsejax.evaluation import Pair, encode_pair, score_pairs
from sparsejax.evaluation.loglikelihood import rolling_pairs
from sparsejax.evaluation.programs import _num_parts

RTOL = 2e-5


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(1)
    sizes = [(1, 1), (3, 5), (20, 12), (30, 3), (1, 32), (12, 1), (40, 2), (5, 20), (9, 9)]
    return [Pair(rng.integers(0, 256, a).tolist(), rng.integers(0, 256, b)) for a, b in sizes]


def expected(reference, pair, limit=32, num_tokens=257):
    ids = [*pair.context, *pair.continuation][-(limit + 1) :]
    count = len(pair.continuation)
    table, targets = reference(ids[:-1])[-count:], ids[-count:]
    greedy = (table[:, :num_tokens].argmax(-1) == targets).all()
    return table[np.arange(count), targets].sum(), greedy


def test_against_rows_one_by_one(model, reference, pairs):
    found = score_pairs(model, pairs, batch_size=4)
    for score, pair in zip(found, pairs, strict=True):
        logprob, greedy = expected(reference, pair)
        assert score.logprob == pytest.approx(logprob, rel=RTOL)
        assert score.greedy == greedy
        assert score.tokens == len(pair.continuation)
        assert score.cut == max(0, len(pair.context) + len(pair.continuation) - 33)
    assert [score.cut > 0 for score in found].count(True) == 1


def test_order_batches_and_mesh_change_nothing(model, model_on_eight, pairs):
    found = score_pairs(model, pairs, batch_size=4)
    backwards = score_pairs(model, pairs[::-1], batch_size=1)[::-1]
    eight = score_pairs(model_on_eight, pairs, batch_size=8)
    for other in (backwards, eight):
        assert [score.greedy for score in other] == [score.greedy for score in found]
        np.testing.assert_allclose(
            [score.logprob for score in other], [score.logprob for score in found], rtol=RTOL
        )
    assert score_pairs(model, []) == []


def test_greedy_is_what_generation_would_give(model, reference):
    ids = [65]
    for _ in range(5):
        ids.append(int(reference(ids)[-1][:257].argmax()))
    other = [*ids[:-1], (ids[-1] + 1) % 256]
    found = score_pairs(model, [Pair(ids[:1], ids[1:]), Pair(other[:1], other[1:])])
    assert [score.greedy for score in found] == [True, False]


def test_logits_in_parts(model, pairs, monkeypatch):
    whole = score_pairs(model, pairs, batch_size=4)
    monkeypatch.setattr("sparsejax.evaluation.programs._MAX_LOGITS", 4 * 8 * 320)
    assert _num_parts(4, 32, 320) == 4
    assert _num_parts(1000, 32, 320) == 32
    assert _num_parts(1, 7, 320) == 1
    fresh = dataclasses.replace(model, config=model.config.replace(init_std=0.5))
    parts = score_pairs(fresh, pairs, batch_size=4)
    np.testing.assert_allclose(
        [score.logprob for score in parts], [score.logprob for score in whole], rtol=RTOL
    )


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (Pair([1], []), "text 1: context and continuation need at least one id each"),
        (Pair([], [1]), "got 0 and 1"),
        (Pair([1], [1] * 33), "has 33 tokens, more than the model's context length 32"),
        (Pair([1], [320]), "text 1: token 1 has id 320, outside the vocabulary"),
    ],
)
def test_pairs_that_do_not_fit(model, pair, message):
    with pytest.raises(ValueError, match=message):
        score_pairs(model, [Pair([1], [2]), pair])


def test_nan_is_named(model):
    params = jax.tree.map(lambda leaf: leaf, model.params)
    params["layer_0"]["ffn"]["down"] = params["layer_0"]["ffn"]["down"].at[:, 0].set(np.nan)
    broken = dataclasses.replace(model, params=params)
    with pytest.raises(FloatingPointError, match="the score of text 0 is nan"):
        score_pairs(broken, [Pair([1], [2])])


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("a line", " of text"),
        ("a line ", "of text"),
        ("naïve", "té"),
        ("東", "京"),
        ("neu", "ron"),
        ("x", "\n\n"),
    ],
)
def test_pairs_are_the_joined_text(model, bpe, context, continuation):
    with_bpe = dataclasses.replace(model, tokenizer=bpe)
    pair = encode_pair(with_bpe, context, continuation)
    assert bpe.decode([*pair.context, *pair.continuation]) == context + continuation
    assert bpe.decode(pair.context) == context.rstrip()


def test_a_shared_token(model, bpe):
    with_bpe = dataclasses.replace(model, tokenizer=bpe)
    before, whole = bpe.encode("neu"), bpe.encode("neuron")
    assert whole[: len(before)] != before
    assert encode_pair(with_bpe, "neu", "ron") == Pair(before, bpe.encode("ron"))
    pair = encode_pair(with_bpe, "neu", "ron", as_harness=True)
    rest = whole[len(before) :] or bpe.encode("ron")
    assert pair == Pair(before, rest)


def test_spaces_go_to_the_continuation(model, bpe):
    with_bpe = dataclasses.replace(model, tokenizer=bpe, prefix=(1,))
    assert bpe.encode("a line of")[-1:] == bpe.encode(" of")
    assert encode_pair(with_bpe, "a line ", "of").continuation == bpe.encode(" of")
    assert encode_pair(with_bpe, "a line ", "of").context == [1, *bpe.encode("a line")]
    assert encode_pair(with_bpe, "", "of") == Pair([1], bpe.encode("of"))
    assert encode_pair(model, "", "of") == Pair([256], [*b"of"])
    with pytest.raises(ValueError, match="the continuation '' has no token"):
        encode_pair(model, "context", "")
    with pytest.raises(ValueError, match=r"small has no tokenizer.*--tokenizer"):
        encode_pair(dataclasses.replace(model, tokenizer=None), "a", "b")


def test_rolling_scores_each_token_once(model, reference):
    ids = np.random.default_rng(2).integers(97, 122, 75)
    text = bytes(ids.tolist()).decode()
    pairs = rolling_pairs(model, text)
    assert [i for pair in pairs for i in pair.continuation] == ids.tolist()
    found = sum(score.logprob for score in score_pairs(model, pairs))
    shifted, want = [256, *ids], 0.0
    for i, target in enumerate(ids):
        start = 43 if i >= 64 else i // 32 * 32  # the last window reaches back to be full
        want += reference(shifted[start : i + 1])[-1][target]
    assert found == pytest.approx(want, rel=RTOL)
    assert rolling_pairs(model, "") == []
