"""`experiments/bench_scaling.py` at tiny shapes on host devices, in this process."""

import json
import re

import numpy as np
import pytest

from sparsejax import presets
from sparsejax.analysis import scaling
from sparsejax.analysis.traffic import traffic
from sparsejax.scaling_benchmark import Shape, default_splits, tokens_of
from tests.scripts import EXPERIMENTS, script_fixture

SCRIPT = EXPERIMENTS / "bench_scaling.py"


script = script_fixture("bench_scaling")


@pytest.mark.slow
def test_splits_and_variants_side_by_side(script, tmp_path, monkeypatch):
    # The sparse engine would be interpreted; its step on a mesh has tests of its own.
    monkeypatch.setitem(script.SMOKE, "variants", ("dense_silu", "dense_relu"))
    out = tmp_path / "rows.jsonl"
    script.main(["--smoke", "--out", str(out)])
    assert out.with_suffix(".png").stat().st_size > 10_000
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    splits = [[1, 1, 1], [1, 2, 2]]
    assert [(r["split"], r["variant"]) for r in rows] == [
        (s, v) for s in splits for v in ("dense_silu", "dense_relu")
    ]
    by = {(*r["split"], r["variant"]): r for r in rows}
    for row in rows:
        devices, one = np.prod(row["split"]), by[1, 1, 1, row["variant"]]
        assert row["devices"] == devices and row["reps"] == 1
        assert row["tokens_per_s"] == pytest.approx(2 * devices * 32 / row["ms"] * 1e3)
        # Weak scaling: as many tokens on every device.
        assert row["efficiency"] == pytest.approx(one["ms"] / row["ms"])
        assert row["gain"] == pytest.approx(by[*row["split"], "dense_silu"]["ms"] / row["ms"])
        assert row["outside_share"] == (0 if devices == 1 else None)
        sizes = row["compiled_bytes"]
        assert sizes["peak"] >= sizes["argument"] + sizes["temp"] > 0
        assert 0 <= row["collective_exposed_share"] <= row["collective_share"] + 1e-9 < 1
        assert (row["collective_share"] > 0) == (devices > 1)
        assert row["modelled_ms"] is None and row["allocator_peak_bytes"] is None
        assert row["sparse_layers"] == 0
    # A device holds its share of the state: all but the norms over fsdp x tensor.
    one, split = (by[*s, "dense_silu"]["compiled_bytes"]["argument"] for s in splits)
    assert 0.25 < split / one < 0.27
    # Activity is set on the rows of one device; 64 tokens do not speak for 256.
    assert by[1, 1, 1, "dense_relu"]["nnz_seen"] == pytest.approx([8.0], rel=0.02)
    assert 8 < by[1, 2, 2, "dense_relu"]["nnz_seen"][0] < 40
    # What the program sends is what the model of scaling says, scalars aside.
    model = presets.get("tiny-dense")
    model = model.replace(layers=model.layers[:1])
    terms = traffic(model, (1, 2, 2), 8, 32, on="host")
    sent = by[1, 2, 2, "dense_silu"]["sent_bytes"]
    assert 0 <= sent - sum(t.sent((1, 2, 2)) for t in terms) < 64 * 4


def test_a_plan(script, tmp_path, capsys):
    out = tmp_path / "plan.jsonl"
    flags = ["--plan", "--plan-devices", "8", "64", "--utilisation", "0.5", "--out", str(out)]
    script.main(flags)
    assert out.with_suffix(".png").stat().st_size > 10_000
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["sequences"], r["devices"]) for r in rows[::3]] == [
        (64, 8), (512, 64), (512, 8), (512, 64),
    ]  # fmt: skip
    model = presets.get("2b")
    best = scaling.plan(model, 64, 512, 2048, utilisation=0.5)[0]
    assert tuple(rows[3]["split"]) == best.split
    assert rows[3]["exposed_ms"] == pytest.approx(best.exposed * 1e3)
    one = scaling.estimate(model, (1, 1, 1), 8, 2048, utilisation=0.5)
    want = [best.tokens_per_s(o) / 64 / one.tokens_per_s() for o in (False, True)]
    assert rows[3]["efficiency"] == pytest.approx(want)
    assert "512 sequences" in capsys.readouterr().out


def test_splits_and_tokens(script):
    assert default_splits(1) == [(1, 1, 1)]
    for devices in (2, 4, 8, 16):
        assert {int(np.prod(s)) for s in default_splits(devices)} == {devices}
    assert (2, 4, 1) in default_splits(8) and (2, 2, 2) in default_splits(8)
    model = presets.get("tiny")
    # Four heads do not divide over eight devices; a count beyond what is there is left out.
    found = script.splits_of(script.Flags(devices=(8, 16)), model)
    assert found[0] == (1, 1, 1) and (1, 1, 8) not in found and (1, 8, 1) in found
    assert all(np.prod(s) in (1, 8) for s in found)
    few, more = (tokens_of(model, Shape(rows, 16)) for rows in (3, 5))
    np.testing.assert_array_equal(few, more[:3])
    assert np.any(few != tokens_of(model, Shape(3, 16), 1))


@pytest.mark.parametrize(
    ("devices", "splits"),
    [
        (1, []),
        (2, [(2, 1, 1), (1, 2, 1), (1, 1, 2)]),
        (4, [(1, 2, 2)]),
    ],
)
def test_smoke_takes_splits_that_fit(script, monkeypatch, devices, splits):
    monkeypatch.setattr(script.jax, "device_count", lambda: devices)
    flags = script.Flags(**script.SMOKE, smoke=True)
    assert script.splits_of(flags, presets.get("tiny")) == [(1, 1, 1), *splits]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"splits": ("2x4",)}, "expected data x fsdp x tensor such as 2x4x1, got '2x4'"),
        ({"splits": ("0x1x1",)}, "got '0x1x1'"),
        (
            {"splits": ("4x4x1",)},
            "4x4x1 needs more than the 8 devices here; on a CPU, "
            "XLA_FLAGS=--xla_force_host_platform_device_count=16 makes 16$",
        ),
    ],
)
def test_wrong_splits(script, changes, message):
    with pytest.raises(ValueError, match=message):
        script.splits_of(script.Flags(**changes), presets.get("tiny"))


def test_a_dense_preset_is_refused(script):
    with pytest.raises(ValueError, match="'tiny-dense' has no ReLU layer"):
        script.bench(script.Flags(preset="tiny-dense"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--calls", "0"], "--calls must be at least 1, got 0"),
        (["--reps", "0"], "--reps must be at least 1, got 0"),
        (["--devices"], "--devices is an empty list"),
        (["--devices", "0"], "--devices: every number must be at least 1, got 0"),
        (["--variants"], "--variants is an empty list"),
        (["--preset", "2b"], "the sparse engine needs a CUDA device, and JAX has 'cpu' here"),
        (["--plan", "--plan-devices", "0"], "--plan-devices: every number must be at least 1"),
        (["--out", "f.png"], "--out f.png is where the figure goes; name a .jsonl file"),
        (["--out", str(SCRIPT / "rows.jsonl")], "--out: nothing can be written in the folder"),
    ],
)
def test_refused_before_anything_is_timed(script, monkeypatch, flags, message):
    monkeypatch.setattr(script.lib, "find_biases", lambda *_: pytest.fail("timed"))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        script.main(["--preset", "tiny", *flags])
