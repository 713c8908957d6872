"""`experiments/study_both.py --smoke`: the steps of the waterfall, in order."""

import csv
import re
import sys

import pytest

from sparsejax.studies.stages import Recovery


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
    # Only what differs is told: all else is compared equal.
    other = "(there vs now): study_l1 '0.001' vs '0.5'. Name another --results, or delete the file"
    with pytest.raises(ValueError, match=rf"study_both\.csv holds .* {re.escape(other)}$"):
        run_study("both", "--l1", "0.5")


def test_another_studys_table_stays(run_study, tmp_path):
    path = tmp_path / "study_both.csv"
    path.write_text("step,parent_layers\ndense SiLU,24\n")
    with pytest.raises(ValueError, match=r"study_both\.csv holds .* parent_layers '24' vs '3'"):
        run_study("both", "--results", str(tmp_path))
    assert path.read_text() == "step,parent_layers\ndense SiLU,24\n"
    assert list(tmp_path.iterdir()) == [path]
    script = sys.modules["study_both"]
    for given, want in ((None, 0.25), (0.0, 0.0), (0.5, 0.5)):
        args = script.Args(l1=0.25, recovery=Recovery(recover_l1=given))
        assert script.recovery_of(args).recover_l1 == want
