"""Reading txt, jsonl and parquet: what comes out, and what each bad input says."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparsejax.data.documents import find_files, read_documents

TEXTS = ["one", "", "two\r\nlines\n", "東京 🙂", "\ufefftext"]


def write_all_kinds(folder, texts, key="text"):
    (folder / "b.jsonl").write_text("\n".join(json.dumps({key: t, "n": 1}) for t in texts) + "\n\n")
    pq.write_table(pa.table({"n": [1] * len(texts), key: texts}), folder / "c.parquet")
    for i, text in enumerate(texts):
        (folder / f"a{i}.txt").write_bytes(text.encode())


def texts_of(file, key="text"):
    return [document.text for document in read_documents(file, key)]


def test_each_kind_gives_the_texts_exactly(tmp_path):
    write_all_kinds(tmp_path, TEXTS, key="body")
    assert texts_of(tmp_path / "b.jsonl", "body") == TEXTS
    assert texts_of(tmp_path / "c.parquet", "body") == TEXTS
    assert [texts_of(tmp_path / f"a{i}.txt")[0] for i in range(len(TEXTS))] == TEXTS


def test_progress_adds_up_to_the_size_of_the_file(tmp_path):
    write_all_kinds(tmp_path, TEXTS * 700)  # more than one batch of parquet rows
    for name in ("b.jsonl", "c.parquet", "a2.txt"):
        file = tmp_path / name
        read = sum(document.input_bytes for document in read_documents(file))
        assert file.stat().st_size - read <= 1  # the empty last line of the jsonl file


def test_origins_name_line_and_row(tmp_path):
    write_all_kinds(tmp_path, TEXTS)
    (tmp_path / "b.jsonl").write_text('\ufeff{"text": "x"}\n\n  \n{"text": "y"}')
    origins = [document.origin for document in read_documents(tmp_path / "b.jsonl")]
    assert origins == [f"{tmp_path}/b.jsonl:1", f"{tmp_path}/b.jsonl:4"]
    origins = [document.origin for document in read_documents(tmp_path / "c.parquet")]
    assert origins[2] == f"{tmp_path}/c.parquet, row 3"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', r"b\.jsonl:2: not valid JSON: "),
        (b"[1, 2]", r"b\.jsonl:2: expected a JSON object, got \[1, 2\]"),
        (b'{"body": "x", "id": 3}', r"b\.jsonl:2: no key 'text'; this line has: 'body', 'id'\."),
        (b"{}", r"b\.jsonl:2: no key 'text'; this line has: \(none\)"),
        (b'{"text": null}', r"b\.jsonl:2: 'text' is None, expected a text"),
        (b'{"text": ["x"]}', r"b\.jsonl:2: 'text' is \['x'\], expected a text"),
        (b'{"text": "\xff"}', r"b\.jsonl:2: not UTF-8 at byte 10 \(0xff\)"),
        (b'{"text": "a\\ud800"}', r"b\.jsonl:2: the text has a lone surrogate '\\ud800' at .* 1"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    file = tmp_path / "b.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b'\n{"text": "fine"}\n')
    documents = read_documents(file)
    assert next(documents).text == "fine"
    with pytest.raises(ValueError, match=message):
        next(documents)


def test_bad_files_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"latin \xe9")
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8 at byte 6 \(0xe9\)"):
        texts_of(tmp_path / "a.txt")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"c\.parquet is not a readable parquet file"):
        texts_of(tmp_path / "c.parquet")
    pq.write_table(pa.table({"body": ["x", None]}), tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=r"d\.parquet: no column 'text'; it has: body"):
        texts_of(tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=r"d\.parquet, row 2: 'body' is None"):
        texts_of(tmp_path / "d.parquet", "body")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"pip install 'sparsejax\[hf\]'"):
        texts_of(tmp_path / "d.parquet", "body")


def test_inputs_are_files_folders_and_globs(tmp_path):
    for name in ("z.txt", "y.jsonl", "sub/x.parquet", "sub/deep/w.txt", "notes.md", "[odd].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")

    def found(*inputs):
        files = find_files([tmp_path / given for given in inputs])
        return [file.relative_to(tmp_path).as_posix() for file in files]

    assert found(".") == ["[odd].txt", "sub/deep/w.txt", "sub/x.parquet", "y.jsonl", "z.txt"]
    assert found("z.txt", "sub") == ["z.txt", "sub/deep/w.txt", "sub/x.parquet"]
    assert found("**/*.txt") == ["[odd].txt", "sub/deep/w.txt", "z.txt"]
    assert found("[odd].txt") == ["[odd].txt"]
    assert found("z.txt", "*.txt") == ["z.txt", "[odd].txt"]
    with pytest.raises(FileNotFoundError, match=r"input '.*/\*\.csv' matched no file"):
        found("z.txt", "*.csv")
    with pytest.raises(ValueError, match=r"notes\.md is of no known kind; .*\.txt, \.jsonl"):
        found("*.md")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match="matched no file"):
        found("bare")
    with pytest.raises(ValueError, match="no inputs"):
        found()
