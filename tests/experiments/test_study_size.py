"""`experiments/study_size.py --smoke`: one row per size, and what is published of it."""

import csv
import sys

import pytest

from sparsejax.calibrate import MEASURED
from sparsejax.studies.records import Records


@pytest.mark.slow
def test_the_gain_is_over_the_fastest_dense_form(run_study, capsys):
    results = run_study("size")
    (record,) = Records(results / "study_size.jsonl").all()
    assert record["key"]["preset"] == "tiny" and record["key"]["mode"] == "forward"
    rows = {row["variant"]: row for row in record["rows"]}
    fastest = min(rows["dense_silu"]["ms"], rows["dense_relu"]["ms"])
    assert record["gain_percent"] == pytest.approx(100 * (fastest / rows["sparse_relu"]["ms"] - 1))
    assert record["gain_least"] <= record["gain_percent"] <= record["gain_most"]
    assert record["nnz_asked"] == pytest.approx(MEASURED[0] * 512 / 2816)
    assert record["nnz_seen"] == pytest.approx(record["nnz_asked"], rel=0.05)
    with (results / "study_size.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["dense_relu_ms"]) == pytest.approx(rows["dense_relu"]["ms"], rel=1e-4)
    assert "published none" in capsys.readouterr().out


def test_an_unknown_mode_is_named(run_study, capsys):
    with pytest.raises(SystemExit):
        run_study("size", "--modes", "prefill")
    assert "modes must be among" in capsys.readouterr().err


def test_refused_before_anything_runs(run_study):
    with pytest.raises(ValueError, match=r"^--results: nothing can be written in the folder"):
        run_study("size", "--results", __file__)
    script = sys.modules["study_size"]
    for changes, message in (
        ({"presets": ()}, "^--presets is an empty list"),
        ({"presets": ("tiny", "nope")}, "^unknown preset 'nope'"),
        ({"calls": 0}, "^--calls must be at least 1, got 0$"),
        ({"presets": ("1b", "tiny"), "layers": 9}, "^--layers must be at most the 4 layers of 't"),
    ):
        with pytest.raises(ValueError, match=message):
            script.main(script.Args(**changes))
