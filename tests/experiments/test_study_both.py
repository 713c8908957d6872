"""`experiments/study_both.py --smoke`: the steps of the waterfall, in order."""

import csv

import pytest


@pytest.mark.slow
def test_the_steps_and_what_they_change(run_study):
    results = run_study("both")
    with (results / "study_both.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = [r["step"] for r in rows]
    assert steps[:3] == ["dense SiLU", "ReLU with L1 term", "sparse engine"]
    assert steps[3].startswith("no attention in ") and steps[5].startswith("fused ")
    assert [steps[k] for k in (4, 6, 7)] == ["distilled", "distilled again", "dead neurons dropped"]
    assert [r["layers"] for r in rows] == ["3"] * 5 + ["2"] * 3
    ce, nnz = ([float(r[k]) for r in rows] for k in ("ce", "nnz"))
    assert nnz[0] == 3 * 64 and 0 < nnz[1] < nnz[0]
    # Another engine computes the same model; so does one without silent neurons.
    assert ce[2] == pytest.approx(ce[1], rel=1e-6)
    assert ce[7] == pytest.approx(ce[6], rel=1e-5)
    assert all(float(r["decode_ms"]) > 0 and float(r["prefill_ms"]) > 0 for r in rows)
    assert (results / "study_both.png").stat().st_size > 10_000
