"""The settings of a training run; `experiments/train.py` makes flags of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from sparsejax import presets
from sparsejax.config import ModelConfig, config_differences
from sparsejax.model import Options
from sparsejax.params import param_shapes
from sparsejax.sharding import MeshConfig
from sparsejax.training import initial
from sparsejax.training.optimizer import OptimizerConfig
from sparsejax.training.step import LossConfig
from sparsejax.types import Params

# Fields of these groups become flags without a prefix: --learning-rate, --l1-coeff.
_flat = tyro.conf.arg(name="")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Attributes:
      preset: the model: tiny, 125m, 0.5b, 1b, 1.5b or 2b, each also with -dense or -nongated; or a
        .json file written by `ModelConfig.to_json`, or the config.json of a run. None takes the
        model of init_from, or tiny.
      init_from: start from the weights of this folder, a run (its newest checkpoint) or a Hugging
        Face folder, instead of random ones; the model is then the one found there, with parameters
        in float32. The data must be of its tokenizer.
      data: "stdlib" (the running Python's standard library as bytes, for models of bytes), or a
        folder made by experiments/prepare_data.py. None takes the corpus of the run that is gone on
        with or started from, and else "stdlib".
      workdir: where everything is written; None makes a new folder under runs/.
      steps: updates of the whole run; schedules depend on it.
      batch_size: sequences of one update, over all devices.
      seq_len: tokens per sequence; None takes the preset's context length.
      seed: parameters, data order and revival draws.
      resume: go on from the newest whole checkpoint of the workdir.
      stop_at: end after this step as an interruption would, with a checkpoint; None runs on.
      mesh: how devices are used; the sizes multiply to the number of devices.
      optimizer: AdamW and its schedule.
      loss: terms of the loss.
      implementation: engine of the feed-forward op: "triton" (sparse, on a CUDA device), "xla"
        (dense), or None to choose.
      residuals: what the sparse engine keeps for its backward pass: "compact" (a tenth of the dense
        engine's), or "full" (faster while a layer is still dense); None takes "full" where that
        fits into the GPU's memory, or with --remat dots or full, and else "compact".
      remat: what the backward pass recomputes: "none", "dots" (all but matmuls), "full".
      mask_documents: keep attention, positions and loss inside documents.
      data_workers: processes that read ahead; 0 reads in this process.
      log_every: steps between lines of metrics.jsonl.
      eval_every: steps between evaluations on held-out text; 0 evaluates at the end only.
      eval_batches: most batches of one evaluation.
      checkpoint_every: steps between checkpoints; one is always made at the end.
      keep: how many checkpoints stay.
    """

    preset: str | None = None
    init_from: Path | None = None
    data: str | None = None
    workdir: Path | None = None
    steps: int = 300
    batch_size: int = 8
    seq_len: int | None = None
    seed: int = 0
    resume: bool = False
    stop_at: int | None = None
    mesh: MeshConfig = MeshConfig()
    optimizer: Annotated[OptimizerConfig, _flat] = OptimizerConfig()
    loss: Annotated[LossConfig, _flat] = LossConfig()
    implementation: Literal["triton", "xla"] | None = None
    residuals: Literal["compact", "full"] | None = None
    remat: Literal["none", "dots", "full"] = "none"
    mask_documents: bool = False
    data_workers: int = 0
    log_every: int = 10
    eval_every: int = 0
    eval_batches: int = 20
    checkpoint_every: int = 200
    keep: int = 3

    def __post_init__(self):
        for name in ("steps", "batch_size", "log_every", "eval_batches", "checkpoint_every"):
            _check(self, name, 1)
        for name in ("seed", "data_workers", "eval_every"):
            _check(self, name, 0)
        for name in ("seq_len", "stop_at"):
            if getattr(self, name) is not None:
                _check(self, name, 1)
        if self.seed >= 1 << 31:
            raise ValueError(f"seed must be below 2**31, got {self.seed}")
        if self.batch_size % self.loss.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of accumulate "
                f"{self.loss.accumulate} (microbatches per update)"
            )
        self._check_l1()
        if self.resume and self.workdir is None:
            raise ValueError("resume needs --workdir: the folder of the run to go on with")

    def _check_l1(self) -> None:
        """Raises if no update of the whole run has the sparsity term (`losses.l1_coefficient`)."""
        loss = self.loss
        first = loss.l1_start + (2 if loss.l1_ramp else 1)  # a ramp begins at 0
        if loss.l1_coeff and first > self.steps:
            raise ValueError(
                f"l1_coeff {loss.l1_coeff:g} with l1_start {loss.l1_start} and l1_ramp "
                f"{loss.l1_ramp}: the sparsity term would set in at update {first}, after the last "
                f"one ({self.steps}); lower --l1-start, raise --steps to at least {first}, or set "
                "--l1-coeff 0"
            )

    def model(self) -> ModelConfig:
        """The preset's configuration.

        Raises:
          ValueError: unknown preset (lists the known), a bad file, seq_len beyond its context, or a
            preset that is not the model of init_from.
          FileNotFoundError: no model in init_from.
        """
        if self.init_from is not None:
            model, place = self._model_of_init_from(self.init_from), f"init_from {self.init_from}"
        else:
            model, place = _preset(self.preset or "tiny"), f"preset {self.preset or 'tiny'!r}"
        if "float16" in (model.dtype, model.param_dtype):
            raise ValueError(
                f"{place} has dtype {model.dtype} and param_dtype "
                f"{model.param_dtype}: gradients underflow in float16; train in bfloat16"
            )
        if self.seq_len is not None and self.seq_len > model.context_length:
            raise ValueError(
                f"seq_len {self.seq_len} exceeds the context length {model.context_length} of "
                f"{place}; use at most that"
            )
        return model

    def _model_of_init_from(self, folder: Path) -> ModelConfig:
        saved = initial.saved_config(self.workdir) if self.resume and self.workdir else None
        if saved is not None:  # a run that goes on does not need the folder it began with
            return saved
        found = initial.initial_config(folder)
        model, _ = self.change_init(found, param_shapes(found))
        if self.preset is not None:
            # Neither dtypes nor what random weights would be belong to the weights.
            ours = model.replace(init_std=1.0).to_dict()
            asked = _preset(self.preset).replace(
                dtype=model.dtype, param_dtype=model.param_dtype, init_std=1.0
            )
            if problems := config_differences(asked.to_dict(), ours):
                raise ValueError(
                    f"preset {self.preset!r} is not the model of init_from {folder} (preset vs "
                    "folder); leave out --preset:\n  " + "\n  ".join(problems[:10])
                )
        return model

    def change_init(self, config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        """What is trained, given what lies in init_from (or its shapes): that very model.

        Experiments override this with surgery.
        """
        return config, params

    def resolved(self) -> TrainConfig:
        """This config with every default that depends on another setting filled in."""
        if self.preset is None and self.init_from is None:
            return dataclasses.replace(self, preset="tiny").resolved()
        if self.data is None:
            return dataclasses.replace(self, data=self._corpus()).resolved()
        if self.loss.l1_coeff is not None:
            return self
        activations = [layer.ffn.activation for layer in self.model().layers if layer.ffn]
        sparse = "relu" in activations
        coeff = 0.0 if not sparse else 1e-2 if (self.preset or "").startswith("tiny") else 2e-5
        return dataclasses.replace(self, loss=dataclasses.replace(self.loss, l1_coeff=coeff))

    def starting_points(self) -> list[Path | None]:
        """Folders of models whose corpus is taken where none is named; the first that has one."""
        return [self.init_from]

    def _corpus(self) -> str:
        own = self.workdir if self.resume and self.workdir else None
        if own is not None and initial.saved_config(own) is not None:
            return initial.saved_corpus(own)
        for folder in self.starting_points():
            if folder is not None and (found := initial.run_corpus(folder)) is not None:
                return found
        return "stdlib"

    def options(self) -> Options:
        """How forward passes run."""
        return Options(
            implementation=self.implementation, remat=self.remat, residuals=self.residuals
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


def _preset(name: str) -> ModelConfig:
    if not name.endswith(".json"):
        return presets.get(name)
    if not Path(name).is_file():
        raise ValueError(f"preset {name!r}: there is no such file")
    return _read_model(Path(name))


def _read_model(path: Path) -> ModelConfig:
    try:
        data = json.loads(path.read_text())
        # A run's config.json holds the model under "config".
        return ModelConfig.from_dict(data.get("config", data) if isinstance(data, dict) else data)
    except ValueError as error:
        raise ValueError(f"preset {path}: {error}") from None


def _check(config: TrainConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if value < least:
        flag = name.replace("_", "-")
        raise ValueError(f"{name} must be at least {least}, got {value}; change --{flag}")
