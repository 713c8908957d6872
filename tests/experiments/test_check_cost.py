"""`experiments/check_cost.py` at tiny shapes, in this process."""

import json
import re
import subprocess
import sys

import pytest

from tests.scripts import EXPERIMENTS, script_fixture

SCRIPT = EXPERIMENTS / "check_cost.py"


script = script_fixture("check_cost")


def test_modelled_and_measured_side_by_side(script, tmp_path):
    out = tmp_path / "new" / "rows.jsonl"
    flags = {"presets": ("tiny",), "batches": (2,), "context": 4, "steps": 4, "calls": 1}
    script.main(script.Flags(**flags, out=out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["model"], r["batch"], r["context"]) for r in rows] == [
        ("tiny", 2, 4),
        ("tiny, shallower", 2, 4),
    ]
    assert rows[1]["modelled_ms"] < rows[0]["modelled_ms"]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["measured_ms"] / row["modelled_ms"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"presets": ("tiny", "nope")}, "unknown preset 'nope'"),
        ({"presets": ()}, "--presets is an empty list"),
        ({"device": "h2"}, "unknown device 'h2' (did you mean 'h200'?)"),
        ({"batches": (1, 0)}, "--batches: every number must be at least 1, got 0"),
        ({"batches": ()}, "--batches is an empty list"),
        ({"calls": 0}, "--calls must be at least 1, got 0"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"context": 16}, "--context 16 has no room for --steps 32: the steps fill the cache up"),
        ({"out": SCRIPT / "rows.jsonl"}, "--out: nothing can be written in the folder"),
    ],
)
def test_refused_before_anything_is_timed(script, monkeypatch, changes, message):
    monkeypatch.setattr(script, "decode_seconds", lambda *_: pytest.fail("timed"))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        script.main(script.Flags(**({"presets": ("tiny",)} | changes)))


def test_a_refusal_is_one_line():
    command = [sys.executable, str(SCRIPT), "--device", "h2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("check_cost.py: unknown device 'h2'")
    assert done.stderr.count("\n") == 1
