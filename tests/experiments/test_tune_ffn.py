"""`experiments/tune_ffn.py --smoke`: every value has its rows, what is printed can be pasted."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import FFNConfig, tuning
from pallas_kernels.gated_ffn import config as configs
from tests.scripts import EXPERIMENTS, script_fixture

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

SCRIPT = EXPERIMENTS / "tune_ffn.py"


script = script_fixture("tune_ffn")


@pytest.mark.parametrize(
    ("flags", "tried"),
    [
        ({}, {"list_chunk": [512, 1024], "list_warps": [1, 2]}),
        (
            {"tokens": 5, "fields": ("decode_depth",)},
            {"decode_depth": [128, 256]},
        ),
        pytest.param(
            {"mode": "train", "fields": ("grad_columns", "walk_warps")},
            {"grad_columns": [128, 256], "walk_warps": [1, 2]},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["forward", "decode", "train"],
)
def test_rows_and_entry(script, tmp_path, capsys, flags, tried):
    out = tmp_path / "new" / "rows.jsonl"
    flags = script.Flags(smoke=True, out=out, **flags)
    script.main(flags)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["field"], r["value"], r["nnz"]) for r in rows] == [
        (field, value, nnz) for field in tried for value in tried[field] for nnz in (4.0, 8.0)
    ]
    tokens = min(flags.tokens, 96)
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "tokens": tokens}
    about |= {"kernel": f"gated_ffn_{flags.mode}", "d_model": 32, "d_ff": 128, "pattern": "uniform"}
    for row in rows:
        assert row["error"] is None
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert {name: row[name] for name in about} == about
        FFNConfig(**row["began_with"])
    chosen = {r["field"]: r["value"] for r in rows if r["chosen"]}
    assert chosen.keys() == tried.keys()
    assert sum(r["chosen"] for r in rows) == 2 * len(tried)  # one value, at both nnz

    text = capsys.readouterr().out
    assert "largest relative error against the default settings: " in text
    source = text[text.index("    # ms ") :]
    [(key, settings)] = eval(f"{{\n{source}\n}}", {"tuning": tuning}).items()
    assert key == tuning.bucket(about["device"], "bfloat16", tokens, 32, 128)
    assert settings == chosen
    config = dataclasses.asdict(FFNConfig(**settings))
    assert {name: config[name] for name in chosen} == chosen
    # Each later field began with what the earlier ones had chosen.
    first, *_, last = rows
    for field in tried:
        if field != last["field"]:
            assert last["began_with"][field] == chosen[field]
    assert first["began_with"][last["field"]] == last["began_with"][last["field"]]


def test_an_entry_keeps_what_was_measured_before(script, monkeypatch):
    monkeypatch.setattr(tuning, "device_kind", lambda: "NVIDIA H200")
    key = tuning.Bucket("NVIDIA H200", "bfloat16", 16384, 1024, 2048)
    other = key._replace(width=2048)
    table = {key: {"walk_warps": 2, "hot_neurons": 64}, other: {"grad_rows": 256}}
    monkeypatch.setattr(configs, "MEASURED", table)
    trials = [
        script.lib.Trial("walk_warps", 1, {15.0: [0.1, 0.3, 0.4], 30.0: [0.5, 0.6, 0.7]}),
        script.lib.Trial("walk_warps", 2, {}, error="too much shared memory"),
        script.lib.Trial("walk_warps", 4, {15.0: [0.2], 30.0: [0.31234567]}, chosen=True),
    ]
    case = script.lib.Case("forward", 16384, 1024, 2816, "bfloat16", (15.0, 30.0))
    text = script.entry(case, trials, "ms, " + "a long word " * 12)
    assert "# 1 / 4: 0.3 / 0.2 at 15, 0.6 / 0.3123 at 30. 2: does not run." in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert eval(f"{{\n{text}\n}}", {"tuning": tuning}) == {
        key: {"walk_warps": 4, "hot_neurons": 64}
    }


def test_no_further_field_after_the_time_limit(script, tmp_path, capsys, monkeypatch):
    clock = iter([0.0, 1.0, 11.0, 11.0])
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    trial = script.lib.Trial("list_chunk", 512, {4.0: [1.0], 8.0: [2.0]}, chosen=True)
    monkeypatch.setattr(script.lib.Tuner, "sweep", lambda *_: [trial])
    monkeypatch.setattr(script.lib.Tuner, "check", lambda _: 0.0)
    script.main(script.Flags(smoke=True, time_limit=10.0))
    text = capsys.readouterr().out
    assert "--time-limit reached, not swept: list_warps\n" in text
    assert '"list_chunk": 512,' in text and '"list_warps"' not in text


def test_a_time_limit_for_nothing(script, monkeypatch):
    monkeypatch.setattr(script.lib.Tuner, "sweep", lambda *_: pytest.fail("timed"))
    with pytest.raises(ValueError, match=r"^--time-limit 0 left no time for any field$"):
        script.main(script.Flags(smoke=True, time_limit=0.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calls": 0}, "^--calls must be at least 1, got 0$"),
        ({"repeats": 0}, "^--repeats must be at least 1, got 0$"),
        ({"tokens": 0}, "^--tokens must be at least 1, got 0$"),
        ({"nnz": ()}, "^--nnz is an empty list"),
        ({"nnz": (30.0, 0.5)}, r"^--nnz: every number must be at least 1, got 0\.5$"),
        ({"time_limit": -1.0}, r"^--time-limit must be at least 0, got -1\.0$"),
        ({"out": SCRIPT / "rows.jsonl"}, "^--out: nothing can be written in the folder"),
        (
            {"fields": ("walk_warps", "grad_warps")},
            "^--fields: grad_warps cannot be swept in --mode forward with --tokens 96; what can: "
            "list_chunk, list_warps, walk_warps$",
        ),
        ({"tokens": 4}, "^tokens must be more than 4, got 4"),
        ({"smoke": False}, "^tuning needs a CUDA device"),
    ],
)
def test_refused_before_anything_is_timed(script, monkeypatch, changes, message):
    monkeypatch.setattr(script.lib.Tuner, "sweep", lambda *_: pytest.fail("timed"))
    with pytest.raises(ValueError, match=message):
        script.main(script.Flags(**({"smoke": True} | changes)))
