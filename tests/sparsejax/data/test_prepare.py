"""Text files to a corpus folder that opens and gives every text back."""

import hashlib
import json

import numpy as np
import pytest

from sparsejax.data import ByteTokenizer, HFTokenizer, encoding, open_source, prepare
from sparsejax.data.documents import Document
from sparsejax.data.encoding import cut_text, encode_documents
from sparsejax.data.prepare import prepare_corpus
from tests.sparsejax.data.test_documents import write_all_kinds

WORDS = ["the", "sparse", "naïve", "東京", "🙂", "<|endoftext|>", "x():", "return\n"]


def make_texts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(1, 30))) + f" {i}" for i in range(count)]


def documents_of(source):
    ends = np.flatnonzero(source.tokens == source.eot_id)
    assert ends[-1] == len(source.tokens) - 1
    starts = [0, *(ends[:-1] + 1)]
    return [source.tokens[a:b].tolist() for a, b in zip(starts, ends, strict=True)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """300 different texts, a third in each kind of file, and one empty one."""
    folder = tmp_path_factory.mktemp("inputs")
    texts = make_texts(300)
    (folder / "sub").mkdir()
    write_all_kinds(folder, texts[:100])
    (folder / "c.parquet").unlink()
    for i in range(100):
        (folder / f"a{i}.txt").unlink()
    write_all_kinds(folder / "sub", texts[100:200])
    (folder / "sub" / "b.jsonl").write_text(json.dumps({"text": ""}))
    for i in range(100):
        (folder / "sub" / f"a{i}.txt").write_text(texts[200 + i])
    return folder, texts


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_prepared_folder_opens_and_gives_back_every_text(kind, inputs, tmp_path, bpe_file):
    folder, texts = inputs
    given = "bytes" if kind == "bytes" else bpe_file
    meta = prepare_corpus([folder], given, tmp_path / "out", val_fraction=0.2, progress=False)
    files = {"meta.json", "train.bin", "val.bin"} | ({"tokenizer.json"} if kind == "bpe" else set())
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert json.loads((tmp_path / "out" / "meta.json").read_text()) == meta

    tokenizer = ByteTokenizer() if kind == "bytes" else HFTokenizer(bpe_file)
    decoded = {}
    for split in ("train", "val"):
        source = open_source(tmp_path / "out", split)
        documents = documents_of(source)
        decoded[split] = [source.tokenizer.decode(ids) for ids in documents]
        assert documents == [tokenizer.encode(text) for text in decoded[split]]
        described = meta["splits"][split]
        text_bytes = sum(len(text.encode()) for text in decoded[split])
        assert described["documents"] == len(documents)
        assert described["tokens"] == len(source.tokens)
        assert described["text_bytes"] == text_bytes
        assert described["max_id"] == source.tokens.max()
        assert described["eot_in_text"] == 0
        assert source.bytes_per_token == text_bytes / len(source.tokens)
        digest = hashlib.sha256((tmp_path / "out" / f"{split}.bin").read_bytes()).hexdigest()
        assert meta["files"][f"{split}.bin"]["sha256"] == digest
        assert source.eot_id == tokenizer.eot_id
    assert sorted(decoded["train"] + decoded["val"]) == sorted(texts)
    assert 30 < len(decoded["val"]) < 90
    assert meta["made_with"]["round_trip"] == {"checked": 300, "exact": 300}


def test_the_bytes_do_not_depend_on_the_number_of_workers(inputs, tmp_path, bpe_file, monkeypatch):
    monkeypatch.setattr(encoding, "_BATCH_CHARACTERS", 100)  # several batches for each thread
    folder, _ = inputs
    metas = []
    for workers in (1, 3):
        out = tmp_path / str(workers) / "out"
        metas.append(prepare_corpus([folder], bpe_file, out, num_workers=workers, progress=False))
    assert metas[0] == metas[1]


def test_the_split_follows_text_and_seed_not_file_or_order(inputs, tmp_path):
    folder, texts = inputs
    held_out = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        given = folder
        if name == "b":  # the same texts in other files and another order
            given = tmp_path / "b.jsonl"
            given.write_text("\n".join(json.dumps({"text": text}) for text in reversed(texts)))
        options = {"val_fraction": 0.2, "seed": seed, "progress": False}
        prepare_corpus([given], "bytes", tmp_path / name, **options)
        source = open_source(tmp_path / name, "val")
        held_out.append({source.tokenizer.decode(ids) for ids in documents_of(source)})
    assert held_out[0] == held_out[1] != held_out[2]


def test_long_texts_are_cut_where_the_ids_stay_the_same(bpe_file, sentencepiece_file):
    rng = np.random.default_rng(0)
    lines = [
        " ".join(rng.choice(WORDS, size=6)) + rng.choice(["\n", " \n", "\n\n"]) for _ in range(400)
    ]
    text = "".join(lines)
    for tokenizer in (ByteTokenizer(), HFTokenizer(bpe_file)):
        pieces = list(cut_text(text, tokenizer, size=500))
        assert "".join(pieces) == text
        assert len(pieces) > len(text) // 1000
        assert max(map(len, pieces)) < 1500
        ids = [i for piece in pieces for i in tokenizer.encode(piece)]
        assert ids == tokenizer.encode(text)
    # This kind puts a space before a text, so it may not be cut.
    assert list(cut_text(text, HFTokenizer(sentencepiece_file), size=500)) == [text]
    for text in ("", "no line end", "ends at once\n", "\n\n\n"):
        assert "".join(cut_text(text, ByteTokenizer(), size=2)) == text


def test_a_text_in_pieces_stays_one_document(tmp_path, bpe_file, monkeypatch):
    monkeypatch.setattr(encoding, "_PIECE_CHARACTERS", 200)
    texts = ["".join(f"line {i} of the text\n" for i in range(100)), "short"]
    documents = [Document(text, str(i), 1) for i, text in enumerate(texts)]
    tokenizer = HFTokenizer(bpe_file)
    ids, pieces = [[], []], 0
    for piece, part in encode_documents(documents, lambda: tokenizer, np.dtype("<u2"), 2):
        ids[int(piece.document.origin)] += part.tolist()
        pieces += 1
    assert pieces > 8
    assert ids == [tokenizer.encode(text) for text in texts]
    (tmp_path / "long.txt").write_text(texts[0])
    meta = prepare_corpus(
        [tmp_path / "long.txt"], bpe_file, tmp_path / "out", val_fraction=0.0, progress=False
    )
    assert meta["splits"]["train"]["documents"] == 1
    assert documents_of(open_source(tmp_path / "out")) == [tokenizer.encode(texts[0])]


def test_only_a_bounded_part_of_the_documents_is_read_ahead():
    read = 0

    def documents():
        nonlocal read
        for i in range(1000):
            read += 1
            yield Document("x" * 300_000, str(i), 1)  # one batch each

    stream = encode_documents(documents(), ByteTokenizer, np.dtype("<u2"), 2)
    for done in range(5):
        next(stream)
        assert read - done <= 2 * 2 + 3
    stream.close()


def test_a_tokenizer_that_loses_text_is_reported(tmp_path, bpe_file):
    content = json.loads(bpe_file.read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for name, text in (("a", "lower"), ("b", "Upper"), ("c", "SHOUT")):
        (tmp_path / f"{name}.txt").write_text(text)
    message = r"1 of 3 decoded to themselves; the first that did not is .*/b\.txt"
    with pytest.warns(UserWarning, match=message):
        meta = prepare_corpus(
            [tmp_path],
            tmp_path / "tokenizer.json",
            tmp_path / "out",
            val_fraction=0,
            progress=False,
        )
    assert meta["made_with"]["round_trip"] == {"checked": 3, "exact": 1}


def test_a_text_that_holds_the_end_mark_is_reported(tmp_path, bpe_file):
    content = json.loads(bpe_file.read_text())
    content["added_tokens"][0]["special"] = False  # so that texts are searched for it
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("one<|endoftext|>two")
    with pytest.warns(UserWarning, match=r"contain <\|endoftext\|> 1 times"):
        meta = prepare_corpus(
            [tmp_path / "a.txt"],
            tmp_path / "tokenizer.json",
            tmp_path / "out",
            val_fraction=0,
            progress=False,
        )
    assert meta["splits"]["train"]["eot_in_text"] == 1


def test_too_few_documents_for_two_splits(tmp_path):
    (tmp_path / "a.txt").write_text("one text")
    with pytest.warns(UserWarning, match=r"no split 'val': none of 1 documents"):
        prepare_corpus([tmp_path / "a.txt"], "bytes", tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match=r"no split 'val'; its meta\.json has: train"):
        open_source(tmp_path / "out", "val")
    assert not (tmp_path / "out" / "val.bin").exists()
    with pytest.raises(ValueError, match=r"all 1 documents fell into 'val' .* 0\.999 and seed 0"):
        prepare_corpus(
            [tmp_path / "a.txt"], "bytes", tmp_path / "b", val_fraction=0.999, progress=False
        )
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match="hold no text"):
        prepare_corpus([tmp_path / "a.txt"], "bytes", tmp_path / "b", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.0}, r"val_fraction must be in \[0, 1\), got 1.0"),
        ({"num_workers": 0}, "num_workers must be at least 1, got 0"),
        ({"tokenizer": "absent.json"}, r"no tokenizer file absent\.json"),
        ({"inputs": ["absent.txt"]}, r"input 'absent\.txt' matched no file"),
    ],
)
def test_bad_arguments_write_nothing(options, message, inputs, tmp_path):
    arguments = {
        "inputs": [inputs[0]],
        "tokenizer": "bytes",
        "out": tmp_path / "x" / "out",
    } | options
    with pytest.raises(ValueError, match=message):
        prepare_corpus(**arguments, progress=False)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_leaves_nothing_behind(inputs, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "_check_splits", stop)  # after all tokens are written
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus([inputs[0]], "bytes", tmp_path / "out", progress=False)
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_middle_leaves_the_old_corpus_in_place(inputs, tmp_path):
    out = tmp_path / "out"
    before = prepare_corpus([inputs[0]], "bytes", out, progress=False)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: 'text' is 3"):
        prepare_corpus([tmp_path / "bad.jsonl"], "bytes", out, overwrite=True, progress=False)
    assert json.loads((out / "meta.json").read_text()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "out"]
    open_source(out)


def test_a_killed_run_leaves_a_folder_that_does_not_open(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.shutil, "rmtree", lambda *_, **__: None)  # no time to clean up
    monkeypatch.setattr(prepare, "_check_splits", None)
    with pytest.raises(TypeError):
        prepare_corpus([inputs[0]], "bytes", tmp_path / "out", progress=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.unfinished-")
    with pytest.raises(ValueError, match=r"has no meta\.json"):
        open_source(left)


def test_only_a_corpus_is_replaced(inputs, tmp_path):
    folder, _ = inputs
    out = tmp_path / "out"
    out.mkdir()  # empty is fine
    prepare_corpus([folder], "bytes", out, progress=False)
    with pytest.raises(ValueError, match="is not empty; choose another, or replace it with --over"):
        prepare_corpus([folder], "bytes", out, progress=False)
    (tmp_path / "a.txt").write_text("other")
    options = {"val_fraction": 0, "progress": False, "overwrite": True}
    meta = prepare_corpus([tmp_path / "a.txt"], "bytes", out, **options)
    assert len(open_source(out).tokens) == 6
    assert meta["splits"].keys() == {"train"}
    assert {path.name for path in out.iterdir()} == {"meta.json", "train.bin"}
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"is not replaced: .* it holds thesis\.tex"):
        prepare_corpus([tmp_path / "a.txt"], "bytes", out, **options)
    with pytest.raises(ValueError, match="which is a file"):
        prepare_corpus([tmp_path / "a.txt"], "bytes", tmp_path / "a.txt", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "a.txt"}


def test_a_folder_stands_for_the_tokenizer_in_it(inputs, tmp_path, bpe_file):
    (tmp_path / "model").mkdir()
    given = tmp_path / "model" / "tokenizer.json"
    given.write_bytes(bpe_file.read_bytes())
    text = inputs[0] / "sub" / "a0.txt"
    by_file, by_folder = (
        prepare_corpus([text], source, tmp_path / name, val_fraction=0, progress=False)
        for name, source in (("one", given), ("two", given.parent))
    )
    assert by_folder["files"] == by_file["files"]
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == given.read_bytes()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no tokenizer file .*empty/tokenizer.json"):
        prepare_corpus([text], tmp_path / "empty", tmp_path / "three", progress=False)
