"""The settings of a distillation run; `experiments/distill.py` makes flags of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from sparsejax.distill.objective import Distillation, DistillLoss, make_distillation
from sparsejax.distill.teacher import load_teacher
from sparsejax.training.config import TrainConfig
from sparsejax.training.initial import initial_tokenizer, tokenizer_difference
from sparsejax.training.loop import train
from sparsejax.training.optimizer import OptimizerConfig
from sparsejax.training.run import Run, say

_flat = tyro.conf.arg(name="")


@dataclasses.dataclass(frozen=True)
class MaybeTaught(TrainConfig):
    """A training run that may have a teacher.

    Attributes:
      teacher: folder of a model to learn from, a run or a Hugging Face folder; None trains on the
        text alone.
      teacher_step: checkpoint of the teacher's run; None takes the newest whole one.
      teacher_dtype: what the teacher is kept and computed in; None takes the student's compute
        dtype (bfloat16, but for small models on a CPU).
      layer_map: the teacher layer of each student layer, -1 for none; None derives it from the two
        models, where there is one way only.
      distill: terms of the loss with a teacher.
    """

    teacher: Path | None = None
    teacher_step: int | None = None
    teacher_dtype: Literal["float32", "bfloat16"] | None = None
    layer_map: tuple[int, ...] | None = None
    distill: Annotated[DistillLoss, _flat] = DistillLoss()

    def __post_init__(self):
        super().__post_init__()
        idle = (self.teacher_step, self.teacher_dtype, self.layer_map)
        if self.teacher is None and (any(x is not None for x in idle) or self.distill != _ALONE):
            raise ValueError(
                "teacher_step, teacher_dtype, layer_map and the weights of distillation have no "
                "meaning without --teacher; leave them out"
            )

    def starting_points(self) -> list[Path | None]:
        """The teacher's corpus first: a student is often made by surgery, without any text."""
        return [self.teacher, self.init_from]

    def objective(self, run: Run) -> Distillation | None:
        """Reads the teacher onto the run's mesh; None without one.

        Raises:
          ValueError: teacher and student do not fit each other, or the teacher is not finite.
          FileNotFoundError: there is no teacher.
        """
        if self.teacher is None:
            return None
        say(f"reading the teacher from {self.teacher}")
        dtype = self.teacher_dtype or run.model.dtype
        teacher = load_teacher(self.teacher, run.mesh, dtype, step=self.teacher_step)
        read_by = initial_tokenizer(self.teacher)
        if line := tokenizer_difference(run.source.tokenizer, read_by):
            say(f"note: the teacher is of another tokenizer than the data (data vs it): {line}")
        pairs = None if self.layer_map is None else [None if t < 0 else t for t in self.layer_map]
        return make_distillation(
            run.model,
            teacher,
            layer_map=pairs,
            weights=self.distill,
            vocab_chunk=self.loss.vocab_chunk,
            seq_len=run.seq_len,
        )


_ALONE = DistillLoss()


@dataclasses.dataclass(frozen=True)
class DistillConfig(MaybeTaught):
    """One distillation run.

    Attributes:
      init_from: folder of the student, a run or a Hugging Face folder; None starts from random
        weights of a preset.
      optimizer: AdamW and its schedule.
    """

    init_from: Annotated[Path | None, tyro.conf.arg(name="student")] = None
    optimizer: Annotated[OptimizerConfig, _flat] = OptimizerConfig(learning_rate=1e-4)

    def __post_init__(self):
        super().__post_init__()
        if self.teacher is None:
            raise ValueError("teacher: name the folder of the model to learn from (--teacher)")
        if self.init_from is None and self.preset is None:
            raise ValueError(
                "student: name the folder of the model to train (--student), or a --preset for "
                "random weights"
            )

    def resolved(self) -> TrainConfig:
        """Without a sparsity term, unless it is asked for."""
        coeff = 0.0 if self.loss.l1_coeff is None else self.loss.l1_coeff
        loss = dataclasses.replace(self.loss, l1_coeff=coeff)
        return dataclasses.replace(super().resolved(), loss=loss)


def distill(config: DistillConfig) -> dict[str, Any]:
    """Trains the student on the teacher; as `sparsejax.training.loop.train`, which it is.

    metrics.jsonl has ce, kl, cosine and cosine_per_layer (with `blocks`, error and
    error_per_layer); eval.jsonl and summary.json the divergence on held-out text as "kl".
    """
    return train(config, config.objective)
