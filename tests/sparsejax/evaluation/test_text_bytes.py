"""Bytes of text, however the stream is cut, against decoding whole documents."""

import numpy as np
import pytest

from sparsejax.data import ByteTokenizer
from sparsejax.evaluation.text_bytes import ByteCounter

DOCUMENTS = ["naïve 東京", "", "🙂" * 30, "a", "plain text\n", "ends with é"]


def count(tokenizer, ids, cuts, **options):
    counter = ByteCounter(tokenizer, tokenizer.eot_id, **options)
    for part in np.split(ids, cuts):
        counter.add(part)
    return counter.finish()


def stream(tokenizer):
    return np.array([i for d in DOCUMENTS for i in [*tokenizer.encode(d), tokenizer.eot_id]])


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_all_documents(name, bpe):
    tokenizer = ByteTokenizer() if name == "bytes" else bpe
    ids, want = stream(tokenizer), sum(len(d.encode()) for d in DOCUMENTS)
    for cuts in ([], range(1, len(ids)), [7, 8, 30], [0, len(ids)]):
        assert count(tokenizer, ids, cuts) == want


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_without_first_tokens(name, bpe):
    tokenizer = ByteTokenizer() if name == "bytes" else bpe
    ids = stream(tokenizer)
    # Of a first token that ends inside a character, the whole characters are left out.
    firsts = [tokenizer.decode(tokenizer.encode(d)[:1]).rstrip("\ufffd") for d in DOCUMENTS if d]
    lost = len(firsts) if name == "bytes" else sum(len(text.encode()) for text in firsts)
    want = sum(len(d.encode()) for d in DOCUMENTS) - lost
    for cuts in ([], range(1, len(ids)), [7, 8, 30]):
        assert count(tokenizer, ids, cuts, skip_first=True) == want


def test_bytes_that_are_no_text_count_as_they_are():
    assert count(ByteTokenizer(), np.array([0xFF, 0xFE, 256, 65]), [1]) == 3


def test_an_unfinished_character(bpe):
    ids = np.array(bpe.encode("🙂"))
    assert len(ids) > 1
    assert count(bpe, ids[:-1], []) == len("\ufffd".encode())


def test_a_long_document_is_decoded_in_parts(bpe):
    text = "東京 naïve " * 9000
    ids = np.array(bpe.encode(text))
    assert len(ids) > 3 * (1 << 14)
    assert count(bpe, ids, []) == len(text.encode())
