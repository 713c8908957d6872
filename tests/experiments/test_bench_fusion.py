"""`experiments/bench_fusion.py` at tiny shapes on host devices, in this process."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "bench_fusion.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_fusion", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_fusion"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_fusion"]


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
