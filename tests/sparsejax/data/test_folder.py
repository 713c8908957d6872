"""A corpus folder: what opens, and what each kind of damage says."""

import hashlib
import json
import math
import shutil

import numpy as np
import pytest

from sparsejax.data import ByteTokenizer, HFTokenizer, folder, open_source, open_tokenizer
from tests.shared_data import SHARED, needs_shared


@pytest.fixture
def corpus(tmp_path, bpe_file):
    """A folder with 100 train and 10 val tokens, and functions to damage it."""
    path = tmp_path / "mine"
    path.mkdir()
    shutil.copy(bpe_file, path / "tokenizer.json")
    tokens = np.arange(100, dtype="<u2") % 320
    tokens[99] = 0
    meta = {
        "name": "mine",
        "dtype": "<u2",
        "vocab_size": 320,
        "eot_id": 0,
        "splits": {},
        "files": {},
    }
    for split, array in (("train", tokens), ("val", tokens[-10:])):
        array.tofile(path / f"{split}.bin")
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        meta["splits"][split] = {
            "file": f"{split}.bin",
            "tokens": len(array),
            "text_bytes": 3 * len(array),
        }
        meta["files"][f"{split}.bin"] = {"sha256": digest}
    write_meta(path, meta)
    return path


def write_meta(path, meta):
    (path / "meta.json").write_text(json.dumps(meta))


def edit_meta(path, edit):
    meta = json.loads((path / "meta.json").read_text())
    edit(meta)
    write_meta(path, meta)


def test_a_folder_opens_memory_mapped(corpus):
    source = open_source(corpus)
    assert isinstance(source.tokens, np.memmap)
    np.testing.assert_array_equal(source.tokens, [*range(99), 0])
    assert (source.name, source.split, source.vocab_size, source.eot_id) == (
        "mine",
        "train",
        320,
        0,
    )
    assert source.bytes_per_token == 3.0
    assert isinstance(source.tokenizer, HFTokenizer)
    assert len(open_source(str(corpus), "val").tokens) == 10
    with pytest.raises(ValueError, match="read-only"):
        source.tokens[0] = 1


def test_a_moved_folder_keeps_its_fingerprint(corpus, tmp_path):
    before = open_source(corpus).fingerprint
    corpus.rename(tmp_path / "moved")
    assert open_source(tmp_path / "moved").fingerprint == before


def test_uint32_for_large_vocabularies(corpus):
    assert folder.token_dtype(65536) == np.dtype("<u2")
    assert folder.token_dtype(65537) == np.dtype("<u4")
    tokens = np.array([70000, 5, 0], dtype="<u4")
    tokens.tofile(corpus / "train.bin")

    def edit(meta):
        del meta["files"]
        meta |= {"dtype": "<u4 (little-endian uint32)", "vocab_size": 70001}
        meta["splits"]["train"] = {"tokens": 3}  # `file` is optional, so is the amount of text

    edit_meta(corpus, edit)
    source = open_source(corpus)
    np.testing.assert_array_equal(source.tokens, tokens)
    assert math.isnan(source.bytes_per_token)


def test_missing_parts_are_named(corpus):
    with pytest.raises(FileNotFoundError, match=r"no split 'test'; its meta\.json has: train, val"):
        open_source(corpus, "test")
    (corpus / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"no file val\.bin for its split 'val'"):
        open_source(corpus, "val")
    (corpus / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        open_source(corpus)
    (corpus / "meta.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no meta\.json"):
        open_source(corpus)
    with pytest.raises(ValueError, match=r"train\.bin is a file; a corpus is a folder"):
        open_source(corpus / "train.bin")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"splits": ', r"meta\.json is not valid JSON"),
        ("", r"meta\.json is not valid JSON"),
        ("[1]", "has no object 'splits'"),
        ('{"vocab_size": 320, "eot_id": 0}', "has no object 'splits'"),
        ('{"splits": {}, "eot_id": 0}', "needs an integer 'vocab_size', got None"),
        ('{"splits": {}, "vocab_size": 320, "eot_id": "0"}', "needs an integer 'eot_id', got '0'"),
        ('{"splits": {}, "vocab_size": 320, "eot_id": 320}', "eot_id is 320, outside vocab_size"),
        ('{"splits": {}, "vocab_size": 320, "eot_id": 0}', r"has: \(none\)"),
    ],
)
def test_broken_meta(corpus, text, message):
    (corpus / "meta.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_source(corpus)


@pytest.mark.parametrize("dtype", [">u2", "int16", "", "float32"])
def test_unknown_dtype(corpus, dtype):
    edit_meta(corpus, lambda meta: meta.update(dtype=dtype))
    with pytest.raises(ValueError, match=rf"dtype is '{dtype}'; expected '<u2' .* or '<u4'"):
        open_source(corpus)


def test_damaged_files(corpus):
    file = corpus / "train.bin"
    whole = file.read_bytes()
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"train\.bin is empty"):
        open_source(corpus)
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"has 199 bytes, not a multiple of the 2 bytes"):
        open_source(corpus)
    file.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=r"has 99 tokens, but meta\.json says 100"):
        open_source(corpus)
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(ValueError, match=r"was changed after it was made: its sha256 is"):
        open_source(corpus)
    file.write_bytes(whole)
    assert len(open_source(corpus).tokens) == 100


def test_an_id_beyond_the_vocabulary_is_found_on_opening(corpus, monkeypatch):
    monkeypatch.setattr(folder, "_CHUNK_TOKENS", 8)  # the bad id is not in the first chunk
    tokens = np.fromfile(corpus / "train.bin", dtype="<u2")
    tokens[77] = 320
    tokens.tofile(corpus / "train.bin")
    with pytest.raises(ValueError, match=r"train\.bin: token 77 has id 320, outside .* of 320 ids"):
        open_source(corpus)


def test_a_large_file_takes_its_identity_from_meta(corpus, monkeypatch):
    whole = open_source(corpus).fingerprint
    monkeypatch.setattr(folder, "FULL_CHECK_BYTES", 100)
    monkeypatch.setattr(folder, "_check_file", None)  # would fail if it were read
    assert open_source(corpus).fingerprint == whole


def test_tokenizer_of_another_corpus(corpus):
    def edit(meta):
        meta["vocab_size"] = 300

    edit_meta(corpus, edit)
    with pytest.raises(ValueError, match=r"has 320 ids, but vocab_size in meta\.json is 300"):
        open_source(corpus)


@needs_shared
@pytest.mark.parametrize(
    ("split", "tokens", "bytes_per_token"),
    [("tiny_train", 1399757, 3.7034), ("val", 223455, 3.7303), ("train", 27999958, 3.7256)],
)
def test_the_shared_corpus_opens_with_its_published_figures(split, tokens, bytes_per_token):
    source = open_source(SHARED / "data" / "corpus", split)
    assert len(source.tokens) == tokens
    assert source.bytes_per_token == pytest.approx(bytes_per_token, abs=1e-4)
    assert (source.vocab_size, source.eot_id) == (16384, 0)
    end = int(np.flatnonzero(source.tokens[:100_000] == 0)[0])
    ids = source.tokens[:end].tolist()
    assert source.tokenizer is not None
    assert source.tokenizer.encode(source.tokenizer.decode(ids)) == ids


def test_the_tokenizer_opens_without_the_tokens(corpus):
    (corpus / "train.bin").unlink()
    tokenizer = open_tokenizer(corpus)
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"
    assert isinstance(open_tokenizer("stdlib"), ByteTokenizer)
    edit_meta(corpus, lambda meta: meta.update(tokenizer="bytes"))
    assert isinstance(open_tokenizer(corpus), ByteTokenizer)
    with pytest.raises(ValueError, match="no corpus 'absent'"):
        open_tokenizer("absent")
