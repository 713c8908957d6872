"""Whole runs of a very small model: exact resume, what is written, what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from sparsejax import MeshConfig, presets
from sparsejax.analysis.activations import ActivationStats
from sparsejax.data.prepare import prepare_corpus
from sparsejax.losses import l1_coefficient
from sparsejax.params import flatten
from sparsejax.training.checkpoint import Checkpointer, CheckpointWarning
from sparsejax.training.config import TrainConfig
from sparsejax.training.loop import NonFiniteLossError, train
from sparsejax.training.metrics import read_rows
from sparsejax.training.optimizer import OptimizerConfig
from sparsejax.training.run import prepare
from sparsejax.training.step import LossConfig
from sparsejax.training.workdir import WorkdirInUseError, WorkdirLock

KEYS = {
    "step", "loss", "ce", "l1", "nnz", "nnz_per_layer", "sparse_layers", "dead_fraction",
    "grad_norm", "learning_rate", "tokens_per_s",
}  # fmt: skip


def config(micro_file, workdir, **changes) -> TrainConfig:
    base = TrainConfig(
        preset=micro_file,
        workdir=workdir,
        steps=20,
        seq_len=16,
        log_every=1,
        eval_batches=2,
        checkpoint_every=5,
        loss=LossConfig(l1_coeff=0.01, revive_dead=0.1),
    )
    return dataclasses.replace(base, **changes)


def final_state(run_config):
    run = prepare(run_config)
    with Checkpointer(run.workdir.checkpoints) as checkpointer:
        return checkpointer.restore(run.template)


@pytest.fixture(scope="module")
def unbroken(micro_file, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unbroken")
    return config(micro_file, workdir), train(config(micro_file, workdir))


@pytest.fixture(scope="module")
def stopped(micro_file, tmp_path_factory):
    """Stopped at step 10 of 20, not yet resumed."""
    workdir = tmp_path_factory.mktemp("stopped")
    return config(micro_file, workdir), train(config(micro_file, workdir, stop_at=10))


def rows_without_speed(workdir):
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in read_rows(workdir)]


def test_a_run_writes_what_it_says(unbroken):
    run, summary = unbroken
    rows = read_rows(run.workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert all(set(row) == KEYS for row in rows)
    assert len(rows[0]["nnz_per_layer"]) == 2
    assert rows[-1]["ce"] < rows[0]["ce"]
    assert summary["status"] == "finished" and summary["step"] == 20
    assert summary["tokens"] == 20 * 8 * 16
    assert json.loads((run.workdir / "summary.json").read_text())["last"] == rows[-1]
    held_out = summary["held_out"]
    assert held_out["tokens"] == 2 * 8 * 16
    assert held_out["bits_per_byte"] == pytest.approx(held_out["ce"] / np.log(2), rel=0.01)
    saved = json.loads((run.workdir / "config.json").read_text())
    assert saved["config"] == run.model().to_dict()
    # The op's own counts on the same batches are the reference for the statistics.
    means = [row["mean"] for row in summary["activations"]]
    np.testing.assert_allclose(means, held_out["nnz_per_layer"], rtol=1e-3)
    stats = ActivationStats.from_json((run.workdir / "activations.json").read_text())
    assert stats.tokens == held_out["tokens"] and stats.summary() == summary["activations"]
    plots = {p.name for p in (run.workdir / "plots").iterdir()}
    assert plots == {"loss.png", "nnz.png", "activations.png"}


def test_stopping_and_resuming_gives_the_same_bits(unbroken, stopped):
    run, first_half = stopped
    assert (first_half["status"], first_half["step"]) == ("stopped", 10)
    summary = train(dataclasses.replace(run, resume=True))
    assert (summary["status"], summary["step"]) == ("finished", 20)
    whole, _ = unbroken
    metrics = (run.workdir / "metrics.jsonl", whole.workdir / "metrics.jsonl")
    assert rows_without_speed(metrics[0]) == rows_without_speed(metrics[1])
    ours, theirs = (flatten(final_state(c).state) for c in (run, whole))
    assert list(ours) == list(theirs)
    for path in ours:
        np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)
    # A finished run that is resumed has nothing to do and changes nothing.
    assert train(dataclasses.replace(run, resume=True))["step"] == 20
    assert rows_without_speed(metrics[0]) == rows_without_speed(metrics[1])


def test_a_truncated_checkpoint_falls_back_and_nothing_is_lost(unbroken, micro_file, tmp_path):
    run = config(micro_file, tmp_path / "run")
    train(dataclasses.replace(run, stop_at=10))
    newest = run.workdir / "checkpoints" / "10" / "state"
    for file in [p for p in newest.rglob("*") if p.is_file() and p.stat().st_size > 4096]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.warns(CheckpointWarning, match="10"):
        summary = train(dataclasses.replace(run, resume=True))
    assert summary["step"] == 20
    whole, _ = unbroken
    assert rows_without_speed(run.workdir / "metrics.jsonl") == rows_without_speed(
        whole.workdir / "metrics.jsonl"
    )


def test_resuming_on_another_mesh_continues_the_losses(unbroken, micro_file, tmp_path):
    run = config(micro_file, tmp_path / "run", mesh=MeshConfig(2, 2, 2))
    train(dataclasses.replace(run, stop_at=10))
    train(dataclasses.replace(run, resume=True, mesh=MeshConfig(1, 2, 4)))
    ours = read_rows(run.workdir / "metrics.jsonl")
    theirs = read_rows(unbroken[0].workdir / "metrics.jsonl")
    np.testing.assert_allclose(
        [row["loss"] for row in ours], [row["loss"] for row in theirs], rtol=1e-4
    )


def test_a_resume_under_another_model_names_the_leaf(stopped, micro, tmp_path):
    run, _ = stopped
    layer = micro.layers[0]
    other = micro.replace(
        layers=(layer, dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, d_ff=96)))
    )
    path = tmp_path / "other.json"
    path.write_text(other.to_json())
    with pytest.raises(ValueError, match=r"layers\[1\]\.ffn\.d_ff.*(64|96).*(64|96)"):
        train(dataclasses.replace(run, preset=str(path), resume=True))


def test_a_resume_with_another_batch_or_text_is_refused(stopped):
    run, _ = stopped
    with pytest.raises(ValueError, match="batch_size: saved 8, now 16"):
        train(dataclasses.replace(run, batch_size=16, resume=True))


def test_a_non_finite_loss_stops_and_names_the_last_good_checkpoint(micro_file, tmp_path):
    run = config(
        micro_file,
        tmp_path / "run",
        checkpoint_every=1,
        optimizer=OptimizerConfig(learning_rate=1e30, schedule="constant", warmup_steps=0),
    )
    with pytest.raises(NonFiniteLossError, match=r"step 2: loss .*last good checkpoint: step 1 in"):
        train(run)
    saved = [p.name for p in (run.workdir / "checkpoints").iterdir() if p.name.isdigit()]
    assert saved == ["1"]
    assert all(np.isfinite(row["loss"]) for row in read_rows(run.workdir / "metrics.jsonl"))


def test_float16_is_refused(micro, tmp_path):
    path = tmp_path / "half.json"
    path.write_text(micro.replace(dtype="float16").to_json())
    with pytest.raises(ValueError, match="underflow in float16"):
        train(config(str(path), tmp_path / "run"))


def test_a_run_left_before_its_first_checkpoint_starts_over(unbroken, micro_file, tmp_path):
    run = config(micro_file, tmp_path / "run", steps=20)
    bad = OptimizerConfig(learning_rate=1e30, schedule="constant", warmup_steps=0)
    with pytest.raises(NonFiniteLossError, match=r"none yet.*Start again with --resume"):
        train(dataclasses.replace(run, optimizer=bad))
    train(dataclasses.replace(run, resume=True))
    assert rows_without_speed(run.workdir / "metrics.jsonl") == rows_without_speed(
        unbroken[0].workdir / "metrics.jsonl"
    )


def test_evaluations_are_those_of_an_unbroken_run(micro_file, tmp_path):
    run = config(micro_file, tmp_path / "run", steps=6, eval_every=2, checkpoint_every=2)
    train(dataclasses.replace(run, stop_at=4))
    train(dataclasses.replace(run, resume=True))
    train(dataclasses.replace(run, resume=True))  # nothing to do, nothing written
    assert [row["step"] for row in read_rows(run.workdir / "eval.jsonl")] == [2, 4, 6]


def test_a_run_killed_before_its_last_summary_still_gets_it(micro_file, tmp_path):
    run = config(micro_file, tmp_path / "run", steps=4, checkpoint_every=2)
    train(dataclasses.replace(run, stop_at=2))
    stopped = (run.workdir / "summary.json").read_text()
    whole = train(dataclasses.replace(run, resume=True))
    (run.workdir / "summary.json").write_text(stopped)  # as if killed after the last checkpoint
    again = train(dataclasses.replace(run, resume=True))
    assert (again["status"], again["step"]) == ("finished", 4)
    assert again["held_out"] == whole["held_out"]


def test_a_lost_config_does_not_lose_the_run(micro_file, tmp_path):
    run = config(micro_file, tmp_path / "run", steps=4, checkpoint_every=2)
    train(dataclasses.replace(run, stop_at=2))
    (run.workdir / "config.json").unlink()
    with pytest.raises(ValueError, match="already holds a run"):
        train(run)
    assert train(dataclasses.replace(run, resume=True))["step"] == 4
    assert json.loads((run.workdir / "config.json").read_text())["train"]["steps"] == 4


def test_damaged_metrics_are_kept_aside_and_said(micro_file, tmp_path):
    run = config(micro_file, tmp_path / "run", steps=4, checkpoint_every=2)
    train(dataclasses.replace(run, stop_at=2))
    metrics = run.workdir / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("{broken" + "\n" + lines[1] + "\n")
    with pytest.warns(UserWarning, match="line 1 is not JSON"):
        train(dataclasses.replace(run, resume=True))
    assert [row["step"] for row in read_rows(metrics)] == [2, 3, 4]
    assert (run.workdir / "metrics.damaged.jsonl").read_text().startswith("{broken")


def test_a_short_val_split_is_said_and_training_goes_on(micro_file, tmp_path, capsys):
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": "word " * 40 + str(i)}) + "\n" for i in range(40)))
    folder = tmp_path / "corpus"
    prepare_corpus([text], "bytes", folder, val_fraction=0.1, progress=False)
    tokens = np.fromfile(folder / "val.bin", "<u2")
    meta = json.loads((folder / "meta.json").read_text())
    tokens[:10].tofile(folder / "val.bin")
    meta["splits"]["val"].pop("tokens")
    meta["files"].pop("val.bin")
    (folder / "meta.json").write_text(json.dumps(meta))
    run = config(micro_file, tmp_path / "run", steps=2, eval_every=1, data=str(folder))
    summary = train(run)
    assert summary["step"] == 2 and summary["held_out"] is None
    assert "a window needs 17" in capsys.readouterr().err


def test_masked_documents_accumulation_and_remat_run_together(micro_file, tmp_path):
    run = config(
        micro_file,
        tmp_path / "run",
        steps=2,
        mask_documents=True,
        remat="dots",
        batch_size=16,
        loss=LossConfig(l1_coeff=0.01, accumulate=2, vocab_chunk=100),
        mesh=MeshConfig(2, 2, 2),
    )
    summary = train(run)
    assert summary["last"]["step"] == 2 and np.isfinite(summary["last"]["loss"])
    assert 0 < summary["held_out"]["tokens"] <= 2 * 16 * 16


def test_workdirs_are_not_mixed(stopped, micro_file, tmp_path):
    run, _ = stopped
    with pytest.raises(ValueError, match="already holds a run; pass --resume"):
        train(run)
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        train(config(micro_file, tmp_path / "nothing", resume=True))
    with WorkdirLock(run.workdir), pytest.raises(WorkdirInUseError):
        train(dataclasses.replace(run, resume=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "3b"}, "known presets: tiny, "),
        ({"preset": "absent.json"}, "no such file"),
        ({"seq_len": 64}, "exceeds the context length 32"),
        ({"batch_size": 12}, "batch size 12 must be a multiple of data x fsdp = 8"),
        ({"mesh": MeshConfig(3, 1, 1)}, "must multiply to the number of devices, 8"),
        ({"mesh": MeshConfig(1, 1, 8)}, "layer_0/attn/k: dimension 1 of size 4 does not divide"),
        ({"data": "/absent/folder"}, "/absent/folder"),
        ({"implementation": "cuda"}, "implementation must be one of"),
    ],
)
def test_wrong_settings_are_named_before_anything_is_written(
    micro_file, tmp_path, changes, message
):
    workdir = tmp_path / "run"
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train(config(micro_file, workdir, **changes))
    assert not workdir.exists()


@pytest.mark.parametrize("inside", [(), ("run",)])
def test_a_file_in_the_place_of_a_workdir(micro_file, tmp_path, inside):
    file = tmp_path / "notes.txt"
    file.write_text("kept")
    with pytest.raises(ValueError, match=r"--workdir .*: .*notes\.txt is a file; name a folder"):
        train(config(micro_file, file.joinpath(*inside)))
    assert file.read_text() == "kept"


def test_a_vocabulary_too_small_for_the_text_is_refused(micro, tmp_path):
    path = tmp_path / "small.json"
    path.write_text(micro.replace(vocab_size=128).to_json())
    with pytest.raises(ValueError, match=r"257.*128|128.*257"):
        train(config(str(path), tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"seed": 1 << 31}, "seed must be below"),
        ({"stop_at": 0}, "stop_at must be at least 1"),
        ({"batch_size": 6, "loss": LossConfig(accumulate=4)}, "multiple of accumulate 4"),
        ({"resume": True, "workdir": None}, "resume needs --workdir"),
    ],
)
def test_wrong_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


@pytest.mark.parametrize(("start", "ramp"), [(19, 0), (18, 0), (18, 5), (17, 1), (20, 0), (19, 5)])
def test_a_sparsity_term_that_never_sets_in_is_refused(start, ramp):
    steps = np.arange(20)
    sets_in = bool((np.asarray(l1_coefficient(steps, 0.1, start, ramp)) > 0).any())
    changes = {"steps": 20, "loss": LossConfig(l1_coeff=0.1, l1_start=start, l1_ramp=ramp)}
    if sets_in:
        # What counts is the whole run: a part of it may end before the term sets in.
        assert TrainConfig(**changes, stop_at=3).steps == 20
        return
    told = f"l1_coeff 0.1 with l1_start {start} and l1_ramp {ramp}: .*after the last one \\(20\\); "
    with pytest.raises(ValueError, match=told + "lower --l1-start, raise --steps"):
        TrainConfig(**changes)


def test_no_term_may_start_late_and_the_default_one_counts():
    loss = LossConfig(l1_start=300)
    assert TrainConfig(loss=dataclasses.replace(loss, l1_coeff=0.0)).resolved()
    assert TrainConfig(loss=loss, preset="tiny-dense").resolved().loss.l1_coeff == 0
    with pytest.raises(ValueError, match=r"l1_coeff 0\.01 with l1_start 300"):
        prepare(TrainConfig(loss=loss, preset="tiny"))


def test_the_default_l1_depends_on_the_preset():
    coefficients = {
        name: TrainConfig(preset=name).resolved().loss.l1_coeff
        for name in ("tiny", "tiny-dense", "2b", "2b-dense")
    }
    assert coefficients == {"tiny": 1e-2, "tiny-dense": 0.0, "2b": 2e-5, "2b-dense": 0.0}
    assert TrainConfig(loss=LossConfig(l1_coeff=0.0)).resolved().loss.l1_coeff == 0.0
    assert presets.tiny().sparse_layers == (0, 1, 2, 3)
    assert jax.process_count() == 1
