"""The script: flags in, a folder and a short report out."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsejax.data import open_source

SCRIPT = Path(__file__).parents[2] / "experiments" / "prepare_data.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare_data"] = module
    spec.loader.exec_module(module)
    return module


def test_flags_reach_the_corpus(script, tmp_path, capsys):
    for i in range(3):
        lines = [json.dumps({"body": f"text {i} {j}"}) for j in range(100)]
        (tmp_path / f"{i}.jsonl").write_text("\n".join(lines))
    arguments = ["--inputs", str(tmp_path / "0.jsonl"), str(tmp_path / "[12].jsonl")]
    arguments += ["--tokenizer", "bytes", "--out", str(tmp_path / "out"), "--text-key", "body"]
    arguments += ["--val-fraction", "0.3", "--seed", "7", "--num-workers", "2"]
    assert script.main(arguments) == 0
    printed = capsys.readouterr()
    train, val = (open_source(tmp_path / "out", split) for split in ("train", "val"))
    documents = [int((source.tokens == 256).sum()) for source in (train, val)]
    assert sum(documents) == 300
    assert 60 < documents[1] < 120
    assert f"train: {documents[0]} documents, {len(train.tokens)} tokens" in printed.out
    assert "100%" in printed.err  # the progress bar

    assert script.main(arguments) == 1
    assert "error: out folder" in capsys.readouterr().err
    assert script.main([*arguments, "--overwrite"]) == 0


def test_errors_and_warnings_are_one_line(script, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one")
    arguments = ["--inputs", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--tokenizer"]
    assert script.main([*arguments, "absent.json"]) == 1
    assert "error: no tokenizer file absent.json" in capsys.readouterr().err
    assert script.main([*arguments, "bytes"]) == 0
    assert "\nwarning: no split 'val'" in capsys.readouterr().err


def test_interruption_writes_nothing(script, tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one")
    monkeypatch.setattr("sparsejax.data.prepare._check_splits", stop)
    arguments = ["--inputs", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert script.main([*arguments, "--tokenizer", "bytes"]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_script_runs_and_documents_its_flags():
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"COLUMNS": "100"},
    )
    for flag in ("inputs", "tokenizer", "out", "text-key", "val-fraction", "seed", "num-workers"):
        assert f"--{flag}" in result.stdout
    # The example can be copied as it is printed.
    assert "--tokenizer tokenizer.json \\\n        --out corpora/mine\n" in result.stdout
