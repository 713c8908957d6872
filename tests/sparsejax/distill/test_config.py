"""Whole distillation runs: what they write, exact resume, what is refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from sparsejax.convert import load_run, save, save_run
from sparsejax.distill import DistillConfig, DistillLoss, distill
from sparsejax.params import flatten
from sparsejax.training.metrics import read_rows
from sparsejax.training.optimizer import OptimizerConfig
from sparsejax.training.step import LossConfig


def config(folders, workdir, **changes) -> DistillConfig:
    teacher, student = folders
    base = DistillConfig(
        teacher=teacher,
        init_from=student,
        workdir=workdir,
        steps=12,
        seq_len=16,
        log_every=1,
        eval_batches=1,
        checkpoint_every=4,
        optimizer=OptimizerConfig(learning_rate=3e-3),
    )
    return dataclasses.replace(base, **changes)


def rows_of(workdir):
    rows = read_rows(workdir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k != "tokens_per_s"} for row in rows]


@pytest.fixture(scope="module")
def unbroken(folders, tmp_path_factory):
    run = config(folders, tmp_path_factory.mktemp("unbroken"))
    return run, distill(run)


def test_a_run_recovers_and_says_so(unbroken, folders):
    run, summary = unbroken
    rows = rows_of(run.workdir)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert list(rows[0])[:6] == ["step", "loss", "ce", "cosine", "cosine_per_layer", "kl"]
    assert rows[-1]["kl"] < 0.8 * rows[0]["kl"]
    assert rows[-1]["cosine"] < 0.9 * rows[0]["cosine"]
    for row in rows:
        np.testing.assert_allclose(row["loss"], row["kl"] + row["cosine"], rtol=1e-5)
        np.testing.assert_allclose(sum(row["cosine_per_layer"]), row["cosine"], rtol=1e-5)
    assert 0 < summary["held_out"]["kl"] < rows[0]["kl"]
    told = json.loads((run.workdir / "config.json").read_text())
    assert told["objective"]["layer_map"] == [1, 2]
    assert told["objective"]["teacher"] == str(folders[0])
    assert told["train"]["loss"]["l1_coeff"] == 0
    assert (run.workdir / "plots" / "loss.png").stat().st_size > 0


def test_stopping_and_resuming_gives_the_same_bits(unbroken, folders, tmp_path):
    whole, _ = unbroken
    run = config(folders, tmp_path / "run")
    assert distill(dataclasses.replace(run, stop_at=6))["status"] == "stopped"
    assert distill(dataclasses.replace(run, resume=True))["step"] == 12
    assert rows_of(run.workdir) == rows_of(whole.workdir)
    ours, theirs = (flatten(load_run(c.workdir)[1]) for c in (run, whole))
    for path in theirs:
        np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)


def test_another_teacher_on_resume_is_told(unbroken, whole, tmp_path, capsys):
    save_run(tmp_path / "other", whole[0], jax.tree.map(lambda x: 2 * x, whole[1]))
    capsys.readouterr()
    distill(dataclasses.replace(unbroken[0], teacher=tmp_path / "other", resume=True))
    told = capsys.readouterr().err
    assert "this setting differs from the run so far (was vs now): teacher" in told
    assert "the objective differs from the run so far (was vs now): [0].digest" in told


def test_blocks_from_hugging_face_folders(folders, whole, cut, tmp_path):
    save(tmp_path / "teacher", *whole)
    save(tmp_path / "student", *cut)
    run = config(
        (tmp_path / "teacher", tmp_path / "student"),
        tmp_path / "run",
        steps=6,
        distill=DistillLoss(blocks=True, block_layers=(0,)),
        loss=LossConfig(l1_coeff=1e-4),
    )
    summary = distill(run)
    rows = rows_of(run.workdir)
    assert list(rows[0])[:4] == ["step", "loss", "error", "error_per_layer"]
    assert rows[-1]["error"] < rows[0]["error"]
    np.testing.assert_allclose(rows[0]["loss"] - rows[0]["error"], 1e-4 * rows[0]["l1"], rtol=1e-2)
    assert summary["held_out"]["kl"] > 0
    after = flatten(load_run(run.workdir)[1])
    for path, before in flatten(cut[1]).items():
        assert np.array_equal(after[path], before) != path.startswith("layer_0/"), path


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_map": (0, 1)}, ValueError, "must end with the teacher's last layer 2"),
        ({"layer_map": (-1, 2, 2)}, ValueError, "an entry for each of the student's 2 layers"),
        ({"preset": "tiny", "init_from": None}, ValueError, "the student 128"),
        ({"seq_len": 64}, ValueError, "seq_len 64 exceeds"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    folders, tmp_path, changes, error, message
):
    with pytest.raises(error, match=message):
        distill(config(folders, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_missing_folders(folders, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        distill(config((tmp_path / "nowhere", folders[1]), tmp_path / "run"))
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        distill(config((folders[0], tmp_path / "nowhere"), tmp_path / "run"))
    with pytest.raises(ValueError, match="--teacher"):
        DistillConfig(init_from=folders[1])
    with pytest.raises(ValueError, match="--student"):
        DistillConfig(teacher=folders[0])
