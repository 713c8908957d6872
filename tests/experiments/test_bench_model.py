"""`experiments/bench_model.py` at tiny shapes, in this process."""

import json
import re

import numpy as np
import pytest

from tests.scripts import EXPERIMENTS, script_fixture

SCRIPT = EXPERIMENTS / "bench_model.py"
VARIANTS = ["dense_silu", "dense_relu", "sparse_relu"]

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


script = script_fixture("bench_model")


# The program that fills decode's cache is prefill's.
@pytest.mark.parametrize(
    ("mode", "tokens", "bounds"),
    [
        pytest.param("train", 64, (7.9, 8.1), marks=pytest.mark.slow),
        ("decode", 6, (1, 40)),
    ],
)
def test_three_variants_side_by_side(script, tmp_path, mode, tokens, bounds):
    out = tmp_path / "rows.jsonl"
    script.main(["--mode", mode, "--smoke", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["variant"] for row in rows] == VARIANTS
    silu, relu, sparse = rows
    for row in rows:
        assert row["mode"] == mode and row["layers"] == 1
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["tokens_per_s"] == pytest.approx(tokens / row["ms"] * 1e3)
        assert row["ratio_to_dense_silu"] == pytest.approx(silu["ms"] / row["ms"])
        assert row["ratio_to_dense_relu"] == pytest.approx(relu["ms"] / row["ms"])
        sizes = row["compiled_bytes"]
        assert sizes["peak"] >= sizes["argument"] + sizes["temp"] > 0
        assert row["joules_per_token"] is None and "no NVIDIA device" in row["energy_reason"]
        assert row["nnz_asked"] == [8.0]
    assert silu["nnz_seen"] == [512.0]
    assert silu["sparse_layers"] == relu["sparse_layers"] == 0
    assert 0 <= sparse["sparse_layers"] <= 1
    np.testing.assert_allclose(sparse["nnz_seen"], relu["nnz_seen"], rtol=1e-3)
    # Activity is set on the first batch, which training reads here; decode feeds other tokens.
    assert all(bounds[0] <= nnz <= bounds[1] for nnz in relu["nnz_seen"])


def test_profiles(script):
    flags = script.Flags(preset="tiny", profile="measured")
    assert script.profile_of(flags, script.model_of(flags))[0] == pytest.approx(156.3 * 512 / 2816)
    flat = script.Flags(preset="tiny", layers=3, nnz=700)
    assert script.profile_of(flat, script.model_of(flat)) == [512.0] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "tiny-dense"}, "has no ReLU layer"),
        ({"preset": "tiny", "seq_len": 250, "mode": "decode"}, "come to 282 positions"),
        ({"preset": "tiny", "seq_len": 257}, "come to 257 positions"),
        (
            {"preset": "tiny", "layers": 99},
            "must be at most the 4 layers of 'tiny', got 99",
        ),
    ],
)
def test_a_model_that_does_not_fit(script, changes, message):
    with pytest.raises(ValueError, match=message):
        script.model_of(script.Flags(**changes))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--calls", "0"], "--calls must be at least 1, got 0"),
        (["--reps", "0"], "--reps must be at least 1, got 0"),
        (["--seq-len", "0"], "--seq-len must be at least 1, got 0"),
        (["--layers", "0"], "--layers must be at least 1, got 0"),
        (["--layers", "-1"], "--layers must be at least 1, got -1"),
        (["--nnz", "-1"], "--nnz must be at least 0, got -1.0"),
        (["--preset", "2b"], "the sparse engine needs a CUDA device, and JAX has 'cpu' here"),
        (["--out", str(SCRIPT / "rows.jsonl")], "--out: nothing can be written in the folder"),
    ],
)
def test_refused_before_anything_is_timed(script, monkeypatch, flags, message):
    monkeypatch.setattr(script.benchmark, "make_case", lambda *_: pytest.fail("timed"))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        script.main(["--preset", "tiny", *flags])
