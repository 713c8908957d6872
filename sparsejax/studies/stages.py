"""Distillation as a stage of a study: a changed model, saved and trained towards its parent."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from sparsejax.config import ModelConfig
from sparsejax.convert import save_run
from sparsejax.data import ByteTokenizer, HFTokenizer, open_tokenizer
from sparsejax.distill.config import DistillConfig
from sparsejax.distill.layer_map import LayerMap
from sparsejax.studies.sweep import Setting
from sparsejax.training.initial import weights_digest
from sparsejax.training.load import load_model
from sparsejax.training.optimizer import OptimizerConfig
from sparsejax.training.stages import run_stage, train_stage
from sparsejax.training.step import LossConfig
from sparsejax.types import Params


@dataclasses.dataclass(frozen=True)
class Recovery:
    """How changed models are distilled.

    Attributes:
      recover_steps: updates.
      recover_rate: peak learning rate.
      recover_l1: coefficient of the sparsity term beside the divergence; None for the study's own,
        which is 0 unless it says otherwise.
    """

    recover_steps: int = 150
    recover_rate: float = 3e-4
    recover_l1: float | None = None


def distilled(
    setting: Setting,
    recovery: Recovery,
    parent: Path,
    name: str,
    config: ModelConfig,
    params: Params,
    layer_map: LayerMap | None = None,
) -> Path:
    """The run in which the changed model was distilled from `parent`; trained now unless it was.

    Args:
      setting: text, batches and the folder of runs.
      recovery: how.
      parent: the run that the model was made of.
      name: of the change; its folder's is made of it and of the parent's.
      config: the changed model.
      params: its parameters.
      layer_map: the parent's layer of each of its layers; None derives it.

    Raises:
      ValueError: the folder holds another change or other settings.
      StageStoppedError: a signal ended it; the same call goes on with it.
    """
    root = setting.runs / f"{parent.name}-{name}"

    def work() -> dict[str, str]:
        # An interrupted attempt may have left a part of it.
        shutil.rmtree(root / "model", ignore_errors=True)
        tokenizer = open_tokenizer(setting.data)
        assert isinstance(tokenizer, HFTokenizer | ByteTokenizer)
        save_run(root / "model", config, params, tokenizer)
        return {"model": "model"}

    weights = weights_digest(parent)
    run_stage(root, {"parent": str(parent), "weights": weights, "config": config.to_dict()}, work)
    train = DistillConfig(
        init_from=root / "model",
        teacher=parent,
        layer_map=None if layer_map is None else tuple(-1 if t is None else t for t in layer_map),
        workdir=root / "run",
        data=setting.data,
        steps=recovery.recover_steps,
        batch_size=setting.batch_size,
        seq_len=setting.seq_len,
        optimizer=OptimizerConfig(learning_rate=recovery.recover_rate),
        loss=LossConfig(l1_coeff=0.0 if recovery.recover_l1 is None else recovery.recover_l1),
        implementation=setting.implementation,
        log_every=max(recovery.recover_steps // 20, 1),
        checkpoint_every=recovery.recover_steps,
        keep=1,
    )
    train_stage(train, train.objective)
    return root / "run"


def model_of(run: Path) -> tuple[ModelConfig, Params]:
    """(config, params) of a run's newest checkpoint."""
    found = load_model(run)
    return found.config, found.params
