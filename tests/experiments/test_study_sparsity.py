"""`experiments/study_sparsity.py --smoke`: what it records, and going on where it was left."""

import csv
import json
import sys

import pytest

from sparsejax.studies.records import Records


@pytest.mark.slow
def test_records_tables_and_one_program_for_all_coefficients(run_study, capsys):
    run_study("sparsity", "--only", "silu", "relu-0", "--time-limit", "0")
    assert "time is up; 2 runs are left" in capsys.readouterr().out
    results = run_study("sparsity", "--only", "silu", "relu-0")
    assert "0 of 2 runs have a record" in capsys.readouterr().out
    before = programs(results)
    results = run_study("sparsity")
    assert "2 of 3 runs have a record" in capsys.readouterr().out
    rows = {r["name"]: r for r in Records(results / "study_sparsity.jsonl").all()}
    assert list(rows) == ["silu", "relu-0", "relu-0.01"]
    # Another coefficient went through the update compiled for the first.
    assert programs(results) == before
    assert rows["silu"]["nnz"] == 64 > rows["relu-0"]["nnz"] > rows["relu-0.01"]["nnz"] > 0
    for row in rows.values():
        assert [point["step"] for point in row["curve"]] == [2, 4]
        assert row["curve"][-1]["held_out"] == row["ce"]
        assert row["best_ce"] == min(point["held_out"] for point in row["curve"])
    # The tables hold what the run folder tells.
    folder = results / "runs" / "relu-0.01-1x32-4-seed0"
    (layer,) = json.loads((folder / "activations.json").read_text())["layers"]
    found = read(results / "study_sparsity_layers.csv", name="relu-0.01")
    assert float(found[0]["mean"]) == pytest.approx(layer["mean"], rel=1e-5)
    positions = read(results / "study_sparsity_positions.csv", name="relu-0.01")
    assert [(p["from"], p["to"]) for p in positions] == [
        ("0", "0"), ("1", "1"), ("2", "3"), ("4", "7"), ("8", "15"), ("16", "31"),
    ]  # fmt: skip
    sums, tokens = layer["position_sum"], layer["position_tokens"]
    assert float(positions[3]["nnz"]) == pytest.approx(sum(sums[4:8]) / sum(tokens[4:8]), rel=1e-5)
    assert {r["seed"] for r in read(results / "study_sparsity_runs.csv")} == {"0"}
    assert (results / "study_sparsity.png").stat().st_size > 10_000
    # Interrupted between the last checkpoint and the summary: gone on with, its times not told.
    assert rows["relu-0.01"]["compile_s"] > 0
    (folder / "summary.json").unlink()
    file = results / "study_sparsity.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"relu-0.01"' not in line))
    run_study("sparsity")
    (again,) = (r for r in Records(file).all() if r["name"] == "relu-0.01")
    assert again["ce"] == rows["relu-0.01"]["ce"]
    assert (again["compile_s"], again["train_s"]) == (None, None)


def test_an_unknown_name_lists_the_runs(run_study):
    with pytest.raises(ValueError, match="names 'relu-7'; the runs are silu, relu-0, relu"):
        run_study("sparsity", "--only", "relu-7")


def test_refused_before_anything_runs(run_study):
    with pytest.raises(ValueError, match=r"^--results: nothing can be written in the folder"):
        run_study("sparsity", "--results", __file__)
    script = sys.modules["study_sparsity"]
    for changes, message in (
        ({"seeds": ()}, "^--seeds is an empty list"),
        ({"setting": script.Setting(steps=0)}, "^--steps must be at least 1, got 0$"),
        ({"warmup": 0.6}, r"^--warmup is the share .* at most 0\.5, got 0\.6$"),
    ):
        with pytest.raises(ValueError, match=message):
            script.main(script.Args(**changes))


def programs(results):
    found = sorted(p.name for p in (results / "runs" / "compiled").iterdir())
    assert any("jit_update" in name for name in found)
    return found


def read(path, **wanted):
    with path.open() as file:
        return [r for r in csv.DictReader(file) if all(r[k] == v for k, v in wanted.items())]
