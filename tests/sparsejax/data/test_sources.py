"""The standard library as a corpus, and arrays as sources."""

import hashlib
import math
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sparsejax.data import ByteTokenizer, array_source, check_vocab, open_source, sources
from sparsejax.data.stdlib import open_stdlib, stdlib_documents


@pytest.fixture(scope="module")
def stdlib():
    return {split: open_source("stdlib", split) for split in ("train", "val")}


def test_stdlib_holds_the_modules_and_nothing_else(stdlib):
    names = [name for name, _ in stdlib_documents()]
    assert names == sorted(names)
    assert len(names) > 400
    assert {"ast.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names)
    for name in names:
        parts = name.split("/")
        assert name.endswith(".py")
        assert not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(parts)
    root = Path(sysconfig.get_path("stdlib"))
    assert dict(stdlib_documents())["ast.py"] == (root / "ast.py").read_bytes()


def test_stdlib_documents_are_split_whole_and_once(stdlib):
    """Both splits cut at 256 give back every module, each in one of them, in path order."""
    texts = dict(stdlib_documents())
    found = {}
    for split, source in stdlib.items():
        *parts, tail = bytes_between_ends(source.tokens)
        assert tail == b""
        found[split] = parts
    assert sorted(found["train"] + found["val"]) == sorted(texts.values())
    order = {text: i for i, text in enumerate(texts.values())}
    for parts in found.values():
        indices = [order[text] for text in parts if list(texts.values()).count(text) == 1]
        assert indices == sorted(indices)
    assert 0.02 < len(found["val"]) / len(texts) < 0.08


def bytes_between_ends(tokens):
    ends = np.flatnonzero(tokens == 256)
    starts = [0, *(ends + 1)]
    stops = [*ends, len(tokens)]
    return [tokens[a:b].astype(np.uint8).tobytes() for a, b in zip(starts, stops, strict=True)]


def test_stdlib_source_says_what_it_is(stdlib):
    for split, source in stdlib.items():
        assert (source.name, source.split) == ("stdlib", split)
        assert (source.vocab_size, source.eot_id) == (257, 256)
        assert isinstance(source.tokenizer, ByteTokenizer)
        marks = int(np.count_nonzero(source.tokens == 256))
        assert source.bytes_per_token == (len(source.tokens) - marks) / len(source.tokens)
        digest = hashlib.sha256(source.tokens.astype("<u2").tobytes()).hexdigest()
        assert digest[:32] in source.fingerprint
        assert str(len(source.tokens)) in source.fingerprint
        assert open_source("stdlib", split).fingerprint == source.fingerprint
    assert stdlib["train"].fingerprint != stdlib["val"].fingerprint


def test_stdlib_in_a_zip_is_the_same_corpus(tmp_path):
    folder, archive = tmp_path / "lib", tmp_path / "lib.zip"
    for i in range(80):
        (folder / f"pkg{i}" / "test").mkdir(parents=True)
        (folder / f"pkg{i}" / "a.py").write_text(f"x = {i}\n")
        (folder / f"pkg{i}" / "test" / "test_a.py").write_text("no")
    (folder / "_sysconfigdata_x.py").write_text("no")
    (folder / "empty.py").write_text("")
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*.py"), reverse=True):
            file.write(path, path.relative_to(folder).as_posix())
    assert len(stdlib_documents(folder)) == 80
    assert stdlib_documents(archive) == stdlib_documents(folder)
    assert open_stdlib("val", archive).fingerprint == open_stdlib("val", folder).fingerprint


def test_stdlib_without_source_files_is_a_clear_error(tmp_path):
    (tmp_path / "os.pyc").write_bytes(b"\x00")
    for root in (tmp_path, tmp_path / "python311.zip"):
        with pytest.raises(ValueError, match=r"has no \.py files at .*prepare_data"):
            open_stdlib("train", root)
    (tmp_path / "one.py").write_text("pass")
    splits = [bool(_opens(tmp_path, split)) for split in ("train", "val")]
    assert sorted(splits) == [False, True]


def _opens(root, split):
    try:
        return open_stdlib(split, root)
    except ValueError as error:
        assert "too few modules" in str(error)  # noqa: PT017
        return None


def test_unknown_names_and_splits_list_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="no split 'test'; it has: train, val"):
        open_source("stdlib", "test")
    with pytest.raises(ValueError, match=r"no corpus 'stdlb': expected one of stdlib, or a folder"):
        open_source("stdlb")
    with pytest.raises(FileNotFoundError, match="prepare_data"):
        open_source(tmp_path / "absent")


def test_array_source_checks_what_it_wraps():
    source = array_source(np.array([3, 1, 0]), vocab_size=4, eot_id=0, name="n", split="s")
    assert source.label == "n/s"
    assert source.tokens.dtype == np.uint32
    assert math.isnan(source.bytes_per_token)
    with pytest.raises(ValueError, match=r"n/train: token 2 has id 4, outside .* 4 ids"):
        array_source(np.array([3, 1, 4]), vocab_size=4, eot_id=0, name="n")
    with pytest.raises(ValueError, match="token 1 has id -1"):
        array_source(np.array([3, -1, 0]), vocab_size=4, eot_id=0)
    with pytest.raises(ValueError, match=r"flat array of integers, got float64\[2\]"):
        array_source(np.array([0.0, 1.0]), vocab_size=4, eot_id=0)
    with pytest.raises(ValueError, match=r"got int64\[1, 2\]"):
        array_source(np.array([[0, 1]]), vocab_size=4, eot_id=0)
    with pytest.raises(ValueError, match="a tokenizer, or both"):
        array_source(np.array([0, 1]), vocab_size=4)


def test_fingerprint_changes_with_name_content_and_length():
    def fingerprint(tokens, name="a"):
        return array_source(np.array(tokens), vocab_size=9, eot_id=0, name=name).fingerprint

    assert fingerprint([1, 2]) == fingerprint([1, 2])
    assert len({fingerprint([1, 2]), fingerprint([2, 1]), fingerprint([1, 2, 0])}) == 3
    assert fingerprint([1, 2], "b") != fingerprint([1, 2])


def test_bits_per_byte():
    source = array_source(np.array([0]), vocab_size=2, eot_id=0, bytes_per_token=4.0)
    assert source.bits_per_byte(8 * math.log(2)) == pytest.approx(2.0, rel=1e-12)


def test_a_model_with_too_small_a_vocabulary_is_refused():
    source = array_source(np.array([0]), tokenizer=ByteTokenizer(), name="n")
    check_vocab(source, 257)
    check_vocab(source, 320)
    message = r"vocab_size is 256, but corpus n/train has ids up to 256; .* to 257 or more"
    with pytest.raises(ValueError, match=message):
        check_vocab(source, 256)


def test_check_ids_names_the_first_bad_id():
    sources.check_ids(np.array([], np.uint16), 4, "n")
    sources.check_ids(np.array([3], np.uint16), 4, "n")
    with pytest.raises(ValueError, match=r"n: token 11 has id 65535"):
        sources.check_ids(np.array([3, 65535, 9], np.uint16), 4, "n", offset=10)
