"""Longer contexts in stages: 8k -> 16k -> 32k -> 128k, each from the one before it.

A stage changes the rotary embedding and the context length of the config; parameters keep their
shapes, so the last ones of a stage are the first ones of the next. Its loss is the cross-entropy,
or, with a teacher that takes such sequences, distillation, as published (arXiv 2503.18908: 54B
tokens at 8k, 5B at 16k, 5B at 32k, 0.8B at 128k).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal

import tyro

from sparsejax.config import ModelConfig, RopeConfig
from sparsejax.distill.config import MaybeTaught
from sparsejax.training.initial import initial_config
from sparsejax.training.optimizer import OptimizerConfig
from sparsejax.training.run import say
from sparsejax.training.stages import train_stage
from sparsejax.types import Params

_flat = tyro.conf.arg(name="")
_WHOLE = ("seq_len", "steps", "batch_size")
# What the numbers of a stage are where they are left out.
_LEFT_OUT = {
    "seq_len": "",
    "steps": "; left out, it is --steps",
    "batch_size": "; left out, it is --batch-size",
    "learning_rate": "; left out, it is --learning-rate",
    "theta": "; left out, it is the model's",
    "factor": "; left out, it is how much longer seq_len is than the model's context",
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage; what is None is as for all stages, or as the model has it.

    Attributes:
      seq_len: tokens per sequence; the context length grows to it.
      steps: updates.
      batch_size: sequences of one update.
      learning_rate: peak.
      theta: base of the rotary wavelengths.
      scaling: "none", "linear" or "llama3"; with the last two `factor` applies.
      factor: None divides seq_len by the context that the model started from.
    """

    seq_len: int
    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    theta: float | None = None
    scaling: Literal["none", "linear", "llama3"] | None = None
    factor: float | None = None

    def __post_init__(self):
        for name, instead in _LEFT_OUT.items():
            value, whole = getattr(self, name), name in _WHOLE
            if value is not None and not (value >= 1 if whole else 0 < value < math.inf):
                allowed = "at least 1" if whole else "positive and finite"
                raise ValueError(
                    f"stage seq_len={self.seq_len}: {name} must be {allowed}, got {value}{instead}"
                )

    @classmethod
    def parse(cls, text: str) -> Stage:
        """Of "seq_len=8192,steps=1000,theta=5e5".

        Raises:
          ValueError: not of this form, an unknown or repeated field, or not a number.
        """
        kinds = {f.name: float for f in dataclasses.fields(cls)}
        kinds |= dict.fromkeys(_WHOLE, int) | {"scaling": str}
        values: dict[str, Any] = {}
        for item in text.split(","):
            name, equals, value = item.strip().partition("=")
            if not equals or name not in kinds or name in values:
                raise ValueError(
                    f"stage {text!r}: {item.strip()!r} is not one field=value of {list(kinds)}"
                )
            try:
                values[name] = kinds[name](value)
            except ValueError:
                raise ValueError(
                    f"stage {text!r}: {name} must be {kinds[name].__name__}, got {value!r}"
                ) from None
        if "seq_len" not in values:
            raise ValueError(f"stage {text!r}: seq_len is missing")
        return cls(**values)


def staged_model(model: ModelConfig, stage: Stage) -> ModelConfig:
    """`model` with the stage's rotary embedding, and a context of at least seq_len.

    Args:
      model: the one that the first stage starts from: factors count from its context.
      stage: what changes.

    Raises:
      ValueError: a factor without a scaling, a rotary embedding that is not possible, or longer
        sequences than the model's context without a word about the rotary embedding.
    """
    rope, longer = model.rope, stage.seq_len > model.context_length
    scaling = rope.scaling if stage.scaling is None else stage.scaling
    if stage.factor is not None and scaling == "none":
        raise ValueError(f"stage seq_len={stage.seq_len}: a factor needs scaling=linear or llama3")
    if longer and stage.theta is None and stage.scaling is None and stage.factor is None:
        raise ValueError(
            f"stage seq_len={stage.seq_len} is longer than the model's context "
            f"{model.context_length}: say theta=... or scaling=... (scaling=none keeps the rotary "
            "embedding as it is)"
        )
    changes: dict[str, Any] = {} if stage.theta is None else {"theta": stage.theta}
    if stage.scaling is not None or stage.factor is not None:
        changes["scaling"] = scaling
        if scaling == "none":
            changes["factor"] = 1.0
        else:
            grown = max(stage.seq_len / model.context_length, 1.0)
            already = rope.factor if rope.scaling == scaling else 1.0
            changes["factor"] = already * grown if stage.factor is None else stage.factor
            if rope.scaling == "none":
                changes["original_context"] = model.context_length
    return model.replace(
        rope=dataclasses.replace(rope, **changes),
        context_length=max(model.context_length, stage.seq_len),
    )


@dataclasses.dataclass(frozen=True)
class StageConfig(MaybeTaught):
    """The run of one stage.

    Attributes:
      rope: the rotary embedding, instead of that of the model in init_from.
      context_length: likewise.
    """

    rope: RopeConfig | None = None
    context_length: int | None = None

    def change_init(self, config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        """The model of init_from with the stage's changes."""
        assert self.rope is not None and self.context_length is not None
        return config.replace(rope=self.rope, context_length=self.context_length), params


@dataclasses.dataclass(frozen=True)
class ExtendConfig(MaybeTaught):
    """Stages of longer and longer sequences; the other settings hold for all of them.

    Attributes:
      stage: a stage as seq_len=16384,steps=500,theta=1e6; may be given several times, in order.
        Fields: seq_len, steps, batch_size, learning_rate, theta, scaling (none, linear, llama3) and
        factor.
      optimizer: AdamW and its schedule, of each stage anew.
    """

    stage: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    optimizer: Annotated[OptimizerConfig, _flat] = OptimizerConfig(learning_rate=1e-5)

    def __post_init__(self):
        super().__post_init__()
        if self.init_from is None or self.workdir is None:
            raise ValueError("a folder to start from (--init-from) and a --workdir are needed")
        if not self.stage:
            raise ValueError("name a --stage or more, such as seq_len=16384,steps=500,theta=1e6")
        if self.seq_len is not None or self.resume:
            raise ValueError(
                "seq_len belongs into a --stage" if self.seq_len else
                "resume is not needed: the same command goes on by itself"
            )  # fmt: skip

    def runs(self) -> list[StageConfig]:
        """The run of each stage, in its folder under workdir.

        Raises:
          ValueError: a stage that is no stage, or that does not fit the model.
        """
        assert self.init_from is not None and self.workdir is not None
        found = initial_config(self.init_from)
        runs: list[StageConfig] = []
        start = self.init_from
        for k, stage in enumerate(Stage.parse(text) for text in self.stage):
            model = staged_model(found, stage)
            base = {f.name: getattr(self, f.name) for f in dataclasses.fields(MaybeTaught)}
            base |= {
                "init_from": start,
                "workdir": self.workdir / f"stage_{k}_{stage.seq_len}",
                "seq_len": stage.seq_len,
                "steps": self.steps if stage.steps is None else stage.steps,
                "batch_size": self.batch_size if stage.batch_size is None else stage.batch_size,
                "rope": model.rope,
                "context_length": model.context_length,
            }
            if stage.learning_rate is not None:
                base["optimizer"] = dataclasses.replace(
                    self.optimizer, learning_rate=stage.learning_rate
                )
            runs.append(StageConfig(**base))
            start = base["workdir"]
        return runs


def extend_context(config: ExtendConfig) -> list[dict[str, Any]]:
    """Runs the stages that are not done, from wherever they stand; the summary of each.

    Raises:
      ValueError: settings that do not fit each other, the model, or what lies in the workdir.
      StageStoppedError: a signal ended a stage; the same call goes on with it.
    """
    summaries = []
    runs = config.runs()
    for k, run in enumerate(runs):
        say(
            f"stage {k + 1} of {len(runs)}: {run.steps} updates of {run.batch_size} x {run.seq_len}"
            f" tokens, rope {run.rope}"
        )
        summaries.append(train_stage(run, run.objective))
    return summaries
