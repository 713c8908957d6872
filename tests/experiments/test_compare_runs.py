"""`experiments/compare_runs.py` on written metrics."""

import csv
import json

import pytest

from tests.scripts import script_fixture

script = script_fixture("compare_runs")


def write(folder, losses):
    folder.mkdir()
    rows = [{"step": 5 * i, "ce": ce, "nnz": 10.0 + i} for i, ce in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_differences_of_the_last_third(script, tmp_path, capsys):
    a = write(tmp_path / "a", [5.0, 4.0, 3.0, 2.0, 2.0, 2.0])
    b = write(tmp_path / "b", [9.0, 9.0, 9.0, 9.0, 2.5, 1.9])
    out = tmp_path / "figure.png"
    script.main(script.Args(runs=(a, b / "metrics.jsonl"), names=("one", "two"), out=out))
    assert "two from one, last third: mean 0.3000, at most 0.5000" in capsys.readouterr().out
    with out.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[4] == {"step": "20", "ce one": "2", "nnz one": "14", "ce two": "2.5"} | {
        "nnz two": "14"
    }
    assert out.stat().st_size > 10_000


def test_refusals(script, tmp_path):
    a, b = write(tmp_path / "a", [1.0, 2.0]), write(tmp_path / "b", [1.0])
    out = tmp_path / "figure.png"
    for runs, names, message in [
        ((a,), (), "at least two runs"),
        ((a, b), (), "'b' logged 1 steps"),
        ((a, a), (), "called alike"),
        ((a, b), ("x",), "one per run, got 1 for 2"),
        ((a, tmp_path / "none"), (), "neither a file nor a folder"),
    ]:
        with pytest.raises(ValueError, match=message):
            script.main(script.Args(runs=runs, names=names, out=out))
    for bad, message in (
        (tmp_path / "figure.xyz", "^--out must end in .png or .pdf or .svg, got "),
        (a / "metrics.jsonl" / "f.png", "^--out: nothing can be written in the folder"),
    ):
        with pytest.raises(ValueError, match=message):
            script.main(script.Args(runs=(a, a), names=("x", "y"), out=bad))
    assert not out.exists() and not (tmp_path / "figure.csv").exists()
