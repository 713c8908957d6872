"""`experiments/bench_fusion.py` at tiny shapes on host devices, in this process."""

import json

import pytest

from tests.scripts import EXPERIMENTS, script_fixture

SCRIPT = EXPERIMENTS / "bench_fusion.py"


script = script_fixture("bench_fusion")


@pytest.mark.parametrize("norm", ["last", "fold"])
def test_one_all_reduce_for_a_run_of_three_layers(script, tmp_path, norm):
    out = tmp_path / "new" / "rows.jsonl"
    script.main(["--smoke", "--tensor", "2", "--norm", norm, "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["batch"], r["form"]) for r in rows] == [
        (b, f) for b in (1, 2) for f in ("sequential", "fused")
    ]
    for one, fused in zip(rows[::2], rows[1::2], strict=True):
        assert (one["all_reduces"], fused["all_reduces"]) == (3, 1)
        assert fused["ratio"] == pytest.approx(one["ms"] / fused["ms"])
        # Norm scales are one at the start, so both rules are the parallel form.
        assert fused["parallel_error"] < 1e-5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "1"], "at least two layers, got 1"),
        (["--steps", "0"], "^--steps must be at least 1, got 0$"),
        (["--reps", "0"], "^--reps must be at least 1, got 0$"),
        (["--d-model", "0"], "^--d-model must be at least 1, got 0$"),
        (["--layers", "0"], "^--layers: a run has at least two layers, got 0$"),
        (["--batches", "1", "0"], "^--batches: every number must be at least 1, got 0$"),
        (["--batches"], "^--batches is an empty list"),
        (["--out", str(SCRIPT / "rows.jsonl")], "^--out: nothing can be written in the folder"),
        (["--tensor", "9"], "needs more than the 8 devices"),
        (["--d-ff", "100", "--tensor", "8"], "100"),
    ],
)
def test_refusals(script, flags, message):
    with pytest.raises(ValueError, match=message):
        script.main(flags)
