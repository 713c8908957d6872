"""`experiments/study_fusion.py --smoke`: every way of fusing has a row, and the rows agree."""

import csv
import sys

import pytest

from sparsejax.studies.records import write_csv


@pytest.mark.slow
def test_all_ways_and_what_they_are_compared_with(run_study, tmp_path):
    results = run_study("fusion")
    rows = read(results / "study_fusion.csv")
    found = [(r["name"], r["family"]) for r in rows]
    assert found == [
        ("parent", "parent"),
        ("cut", "cut"),
        ("base", "base"),
        ("fuse 2", "fuse"),
        ("fuse 2", "fuse, last layer in"),
        ("fuse 2", "fuse, own norms"),
        ("reverse 2", "reverse"),
        ("fuse all", "fuse"),
        ("fuse all", "fuse, own norms"),
        ("reverse all", "reverse"),
        ("remove 1", "remove"),
        ("remove 2", "remove"),
        ("fuse 2, distilled", "fuse, distilled"),
        ("remove 1, distilled", "remove, distilled"),
        ("base, distilled", "base, distilled"),
    ]
    assert {r["name"]: (r["layers"], r["saved"]) for r in rows if r["family"] == "fuse"} == {
        "fuse 2": ("2", "1"),
        "fuse all": ("1", "2"),
    }
    assert {r["held_out_tokens"] for r in rows} == {str(2 * 8 * 32)}
    timed = {r["name"] for r in rows if r["decode_ms"]}
    assert timed == {"parent", "base", "fuse 2", "fuse all", "remove 1", "remove 2"}
    # Windows begin with the parent itself.
    by_row = {r["family"]: float(r["ce"]) for r in rows}
    windows = read(results / "study_fusion_windows.csv")
    assert [w["count"] for w in windows] == ["0", "1"]
    assert float(windows[0]["ce"]) == pytest.approx(by_row["parent"])
    assert float(windows[1]["ce"]) != pytest.approx(by_row["parent"], abs=1e-7)
    for name in ("study_fusion.png", "study_fusion_dependency_base.png"):
        assert (results / name).stat().st_size > 10_000
    rows = (dict(row, study_window="9") for row in rows)
    write_csv(tmp_path / "study_fusion.csv", rows)
    only = r"\(there vs now\): study_window '9' vs '3'\. Name another --results"
    with pytest.raises(ValueError, match=only):
        run_study("fusion", "--results", str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], r"study_fusion\.csv holds .* parent_layers '24' vs '3'.* Name another --results"),
        (["--results", __file__], "^--results: nothing can be written in the folder"),
    ],
)
def test_refused_before_anything_is_trained(run_study, tmp_path, flags, message):
    (tmp_path / "study_fusion.csv").write_text("name,parent_layers\nparent,24\n")
    with pytest.raises(ValueError, match=message):
        run_study("fusion", "--results", str(tmp_path), *flags)
    assert [p.name for p in tmp_path.iterdir()] == ["study_fusion.csv"]


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_window_has_to_fit_the_model(run_study, tmp_path):
    with pytest.raises(ValueError, match=r"^--results: nothing can be written"):
        run_study("fusion", "--results", __file__)  # loads the script
    script = sys.modules["study_fusion"]
    with pytest.raises(ValueError, match=r"^--window must be at most --layers, 24, got 25$"):
        script.main(script.Args(window=25, results=tmp_path))
    assert not list(tmp_path.iterdir())
