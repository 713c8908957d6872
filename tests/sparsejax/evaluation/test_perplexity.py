"""Perplexity against a loop over single tokens, on one device and on eight."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from sparsejax.data import ByteTokenizer, array_source
from sparsejax.evaluation import perplexity

EOT = 256
RTOL = 2e-5


def source_of(ids, **options):
    return array_source(np.asarray(ids, np.uint16), tokenizer=ByteTokenizer(), **options)


@pytest.fixture(scope="module")
def ids():
    ids = np.random.default_rng(0).integers(0, 128, 75)
    ids[[9, 10, 31, 60]] = EOT
    return ids


def token_nats(reference, ids, window, stride, opening=EOT):
    """Per token: how many inputs it was predicted from, and -log p. One window per token."""
    shifted, found = [opening, *ids], []
    for i in range(len(ids)):
        start = 0 if i < window else stride * -(-(i - window + 1) // stride)
        seen = shifted[start : i + 1]
        found.append((len(seen), -reference(seen)[-1][ids[i]]))
    return np.array(found)


@pytest.mark.parametrize(
    ("window", "stride", "batch_size"),
    [(16, None, 4), (32, None, 4), (16, 5, 4), (16, 16, 1), (16, 1, 4), (32, 31, 4), (1, 1, 4)],
)
def test_against_a_loop_over_tokens(model, reference, ids, window, stride, batch_size):
    want = token_nats(reference, ids, window, stride or window)
    options = {"window": window, "stride": stride, "batch_size": batch_size}
    found = perplexity(model, source_of(ids), **options)
    assert found.tokens == found.scored == found.position_tokens.sum() == len(ids)
    assert found.nats == pytest.approx(want[:, 1].sum(), rel=RTOL)
    assert found.perplexity == pytest.approx(math.exp(want[:, 1].mean()), rel=RTOL * 10)
    for position in range(window):
        at = want[want[:, 0] == position + 1, 1]
        assert found.position_tokens[position] == len(at)
        assert found.position_nats[position] == pytest.approx(at.sum(), rel=RTOL, abs=1e-6)


def test_on_eight_devices(model, model_on_eight, ids):
    one = perplexity(model, source_of(ids), window=16, stride=5, batch_size=4)
    eight = perplexity(model_on_eight, source_of(ids), window=16, stride=5, batch_size=4)
    np.testing.assert_allclose(eight.position_nats, one.position_nats, rtol=RTOL)
    np.testing.assert_array_equal(eight.position_tokens, one.position_tokens)
    np.testing.assert_allclose(eight.nnz_per_layer, one.nnz_per_layer, rtol=1e-6)
    with pytest.raises(ValueError, match="batch size 3 must be a multiple"):
        perplexity(model_on_eight, source_of(ids), batch_size=3)


def test_documents_apart(model, reference, ids):
    found = perplexity(model, source_of(ids), window=16, batch_size=4, mask_documents=True)
    nats, size = [], 0
    for start in range(0, len(ids), 16):  # each window's documents, one by one
        inputs = [EOT, *ids][start : start + 16]
        targets = list(ids[start : start + 16])
        piece = []
        for token, target in zip(inputs, targets, strict=False):
            piece.append(token)
            if token == EOT:
                piece = []
            else:
                nats.append(-reference(piece)[-1][target])
                size += target != EOT
    assert found.scored == len(nats) == len(ids) - 5
    assert found.nats == pytest.approx(sum(nats), rel=RTOL)
    assert found.text_bytes == size
    assert found.tokens == 75


def test_bits_per_byte(model, ids):
    found = perplexity(model, source_of(ids, bytes_per_token=71 / 75), window=16, batch_size=4)
    assert found.text_bytes == found.source_text_bytes == 71
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / 71)
    part = perplexity(model, source_of(ids), window=16, batch_size=4, max_tokens=10)
    assert (part.tokens, part.text_bytes, part.source_text_bytes) == (10, 9, None)
    plain = array_source(ids.astype(np.uint16), vocab_size=257, eot_id=EOT)
    unknown = perplexity(model, plain, window=16, batch_size=4)
    assert unknown.bits_per_byte is unknown.text_bytes is None
    assert unknown.nats == found.nats


def test_a_beginning_of_sequence_token(model, reference, ids):
    with_prefix = dataclasses.replace(model, prefix=(300,))
    found = perplexity(with_prefix, source_of(ids), window=16, batch_size=4)
    want = token_nats(reference, ids, 16, 16, opening=300)[:, 1]
    assert found.nats == pytest.approx(want.sum(), rel=RTOL)


def test_a_text_of_one_token(model, reference):
    found = perplexity(model, source_of([65]), window=16, batch_size=4)
    assert found.scored == 1
    assert found.nats == pytest.approx(-reference([EOT])[0][65], rel=RTOL)
    with pytest.raises(ValueError, match="every one of its 3 tokens is the first of a document"):
        perplexity(model, source_of([EOT] * 3), window=16, batch_size=4, mask_documents=True)
    with pytest.raises(ValueError, match="there is no token to score"):
        perplexity(model, source_of(np.zeros(0)), window=16, batch_size=4)


def test_nan_is_named(model, ids):
    params = jax.tree.map(lambda leaf: leaf, model.params)
    params["embed"]["embedding"] = params["embed"]["embedding"].at[100].set(np.nan)
    ids = np.where(ids == 100, 101, ids)
    ids[70] = 100  # tied embeddings: the head is NaN everywhere
    broken = dataclasses.replace(model, params=params)
    with pytest.raises(FloatingPointError, match="among tokens 0 to 63, at position 0"):
        perplexity(broken, source_of(ids), window=16, batch_size=4)


def test_another_tokenizer_is_refused(model, bpe, ids):
    other = array_source(ids.astype(np.uint16), tokenizer=bpe)
    with pytest.raises(ValueError, match=r"with another tokenizer.*id 1 is '<s>' vs '\\x01'"):
        perplexity(model, other)
    small = dataclasses.replace(model, config=model.config.replace(vocab_size=256))
    with pytest.raises(ValueError, match="vocab_size is 256, but corpus"):
        perplexity(small, source_of(ids))
    perplexity(dataclasses.replace(model, tokenizer=bpe), other, window=16, batch_size=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 33}, "window 33 exceeds the model's context length 32"),
        ({"stride": 33}, "stride must be in"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit(model, ids, options, message):
    with pytest.raises(ValueError, match=message):
        perplexity(model, source_of(ids), **options)
