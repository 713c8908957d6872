"""experiments/bench_ffn.py at tiny sizes: it runs, and its rows say what was asked and seen."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import ffn_benchmark
from tests.scripts import EXPERIMENTS, script_fixture

SCRIPT = EXPERIMENTS / "bench_ffn.py"


script = script_fixture("bench_ffn")


def run(script, tmp_path, **flags):
    out = tmp_path / "new" / "rows.jsonl"
    small = {"d_model": 32, "d_ff": 256, "implementation": "xla", "repeats": 2, "calls": 2}
    script.main(script.Flags(**(small | flags), out=out))
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_forward_rows(script, tmp_path):
    rows = run(script, tmp_path, tokens=(96, 2), nnz=(8.0, 64.0), layers=2, plot=tmp_path / "p.png")
    names = ["engine", "dense_three", "dense_stacked", "dense_concat"]
    assert [r["implementation"] for r in rows] == names * 4
    for row in rows:
        assert row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["ratio"] == pytest.approx(row["dense_ms"] / row["ms"])
        assert row["error"] < 0.01
        assert row["nnz"] == pytest.approx(row["nnz_asked"], rel=0.35)
    dense = [r["ms"] for r in rows[:4] if r["implementation"].startswith("dense")]
    assert rows[0]["dense_ms"] == min(dense)
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_train_rows_carry_every_gradients_error(script, tmp_path):
    rows = run(script, tmp_path, mode="train", tokens=(96,), nnz=(8.0,), pattern="powerlaw")
    assert set(rows[0]["error"]) == {"y", "l1", "dx", "dgate", "dup", "ddown"}
    assert 0 < max(rows[0]["error"].values()) < 0.02
    assert rows[0]["error"] == rows[0]["dense_error"]  # the same engine here


def test_stored_masks_are_what_the_stages_see(script, tmp_path, monkeypatch):
    """The masks reach the timed call: a stand-in for the stages after the gate counts them."""
    masks = np.random.default_rng(0).random((3, 5, 64)) < 0.1
    file = tmp_path / "masks.npz"
    np.savez(file, bits=np.packbits(masks, axis=-1))

    def dense_after(tokens, width, features, dtype):
        return lambda x, pre, up, down: (ffn_benchmark.relu(pre) * (x @ up.T)) @ down

    monkeypatch.setattr(ffn_benchmark, "after_gate_form", dense_after)
    rows = run(script, tmp_path, pattern="real", masks=file, tokens=(10,), layers=2)
    assert [r["layer"] for r in rows] == [0, 1, 2]
    for row, mask in zip(rows, masks, strict=True):
        assert row["nnz"] == pytest.approx(mask.sum(-1).mean())
        assert row["ms"] == pytest.approx(row["gate_ms"] + row["after_gate_ms"])
        assert row["d_ff"] == 64  # of the masks, whatever the flag says


def test_stored_masks_are_met_in_training(script, tmp_path):
    masks = np.random.default_rng(0).random((2, 40, 64)) < 0.1
    masks[1, 3] = True
    file = tmp_path / "masks.npz"
    np.savez(file, bits=np.packbits(masks, axis=-1))
    rows = run(script, tmp_path, mode="train", pattern="real", masks=file, tokens=(70,))
    engines = [r for r in rows if r["implementation"] == "engine"]
    assert [r["layer"] for r in engines] == [0, 1]
    for row, mask in zip(engines, masks, strict=True):
        # D = 32: the first 32 tokens, again and again.
        assert row["nnz"] == pytest.approx(mask[np.arange(70) % 32].sum(axis=1).mean())
        assert row["d_ff"] == 64 and max(row["error"].values()) < 0.02


def test_inputs_fire_what_masks_say():
    masks = np.random.default_rng(0).random((48, 200)) < 0.2
    x, gate = ffn_benchmark.mask_inputs(jax.random.key(0), masks, 48, jnp.bfloat16)
    assert x.dtype == gate.dtype == jnp.bfloat16
    pre = np.array(x, np.float64) @ np.array(gate, np.float64).T
    np.testing.assert_array_equal(pre > 0, masks)
    assert np.abs(pre).min() > 0.08
    with pytest.raises(ValueError, match="48 tokens: at most D = 32"):
        ffn_benchmark.mask_inputs(jax.random.key(0), masks, 32, jnp.bfloat16)


@pytest.mark.parametrize("nnz", [3.0, 40.0])
def test_power_law_rates(nnz):
    rates = ffn_benchmark.firing_rates("powerlaw", 256, nnz)
    assert rates.sum() == pytest.approx(nnz, rel=1e-3)
    assert rates.max() <= 0.9
    # By rank 1 / r from where the cap ends: the tenth of the hottest holds a third or more.
    assert np.sort(rates)[::-1][:26].sum() > nnz / 3


def test_activity_follows_the_rates():
    weights = ffn_benchmark.random_weights(jax.random.key(0), 64, 128, jnp.float32)
    gate, *_ = ffn_benchmark.with_activity(weights, "powerlaw", 20.0)
    x = ffn_benchmark.random_tokens(jax.random.key(1), 4000, 64, jnp.float32)
    seen = np.array(jnp.mean(x @ gate.T > 0, axis=0))
    np.testing.assert_allclose(seen, ffn_benchmark.firing_rates("powerlaw", 128, 20.0), atol=0.06)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calls": 0}, "^--calls must be at least 1, got 0$"),
        ({"repeats": 0}, "^--repeats must be at least 1, got 0$"),
        ({"tokens": ()}, "^--tokens is an empty list"),
        ({"nnz": (3.0, -1.0)}, r"^--nnz: every number must be at least 0, got -1\.0$"),
        ({"layers": 0}, "^--layers must be at least 1, got 0$"),
        ({"plot": Path("f.xyz")}, "^--plot must end in .png or .pdf or .svg, got f.xyz$"),
        ({"plot": SCRIPT / "f.png"}, "^--plot: nothing can be written in the folder"),
    ],
)
def test_refused_before_anything_is_timed(script, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(script, "bench_op", lambda *_: pytest.fail("timed"))
    with pytest.raises(ValueError, match=message):
        run(script, tmp_path, **changes)


def test_a_missing_file_is_named(script, tmp_path):
    with pytest.raises(ValueError, match=r"absent\.npz: there is no such file"):
        run(script, tmp_path, pattern="real", masks=tmp_path / "absent.npz")
    (tmp_path / "notes.txt").write_text("no masks")
    with pytest.raises(ValueError, match=r"notes.txt: expected an .npz file with an array 'bits'"):
        run(script, tmp_path, pattern="real", masks=tmp_path / "notes.txt")


@pytest.mark.parametrize("mode", ["forward", "train"])
def test_smoke(script, tmp_path, mode):
    out = tmp_path / "rows.jsonl"
    script.main(script.Flags(mode=mode, smoke=True, out=out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    asked = {(r["tokens"], r["nnz_asked"]) for r in rows if r["implementation"] == "engine"}
    assert asked == {(t, n) for t in (96, 2) for n in (4.0, 16.0)}
    for row in rows:
        errors = row["error"] if mode == "train" else {"y": row["error"]}
        assert 0 < max(errors.values()) < 0.02, row  # the sparse engine, interpreted


def test_flags_beside_smoke_that_it_would_replace(script):
    with pytest.raises(ValueError, match=r"--repeats 7 beside --smoke, which sets 2 there"):
        script.main(script.Flags(smoke=True, repeats=7))


def test_the_sparse_engine_without_a_gpu(script):
    with pytest.raises(ValueError, match="the sparse engine needs a CUDA device"):
        script.main(script.Flags())


def test_chained_calls_keep_their_inputs_and_wait_for_each_other(script):
    seen = []

    def form(x, weight):
        seen.append(1)
        return x * weight

    x = jnp.arange(3.0)
    calls = ((x, jnp.float32(2)), (x + 1, jnp.float32(5)))
    program = jax.jit(script.bench.chained(form))
    np.testing.assert_array_equal(program(*calls), 5 * (x + 1))
    # In the loop's body the second call needs the first one's result: neither can go.
    text = program.lower(*calls).as_text()
    assert len(seen) == 2 and text.count("stablehlo.multiply") >= 4
