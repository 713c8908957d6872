"""What one training run is made of: checked settings, model, mesh, corpus and folder."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from tqdm import tqdm

from sparsejax.config import ModelConfig, config_differences
from sparsejax.data import Loader, TokenSource, check_vocab, make_loader, open_source
from sparsejax.model import forward
from sparsejax.sharding import check_batch, make_mesh
from sparsejax.training.checkpoint import Checkpointer
from sparsejax.training.config import TrainConfig
from sparsejax.training.evaluate import process_block
from sparsejax.training.optimizer import make_optimizer, make_schedule
from sparsejax.training.state import TrainState, sharded_state, state_template
from sparsejax.training.workdir import Workdir

# Settings that a resumed run may change without a remark.
_FREE_TO_CHANGE = ("resume", "stop_at", "workdir", "mesh")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose arguments fit each other; made by `prepare`, which touches no file."""

    config: TrainConfig
    model: ModelConfig
    mesh: Mesh
    source: TokenSource
    workdir: Workdir
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    template: TrainState

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        return self.config.seq_len or self.model.context_length

    def loader(self, source: TokenSource, **changes: Any) -> Loader:
        """This process's batches of `source`, with `make_loader` arguments changed."""
        index, blocks = process_block(self.mesh, self.config.batch_size)
        arguments: dict[str, Any] = {
            "batch_size": self.config.batch_size,
            "seq_len": self.seq_len,
            "seed": self.config.seed,
            "process_index": index,
            "process_count": blocks,
            "worker_count": self.config.data_workers,
            "mask_documents": self.config.mask_documents,
        }
        return make_loader(source, **arguments | changes)

    def check_workdir(self) -> None:
        """Raises where a new run would mix with an old one, or there is nothing to resume."""
        exists = self.workdir.config.exists()
        if exists and not self.config.resume:
            raise ValueError(
                f"{self.workdir.root} already holds a run; pass --resume to go on with it, or "
                "another --workdir"
            )
        if self.config.resume and not exists:
            raise FileNotFoundError(
                f"{self.workdir.root} holds no run to resume (it has no "
                f"{self.workdir.config.name}); leave out --resume to start one"
            )

    def start(self, checkpointer: Checkpointer, loader: Loader) -> TrainState:
        """A fresh state, or with `resume` the newest whole checkpoint and the data's position."""
        if not self.config.resume:
            return sharded_state(self.model, self.optimizer, self.mesh, self.config.seed)
        restored = checkpointer.restore(self.template, expected_config=self.model.to_dict())
        loader.restore(restored.extra["loader"])
        say(f"resumed {self.workdir.root} after step {restored.step}")
        was = restored.extra["train"]
        for line in config_differences(was, self.config.to_dict()):
            if not line.startswith(_FREE_TO_CHANGE):
                say(f"note: this setting differs from the run so far (was vs now): {line}")
        return restored.state

    def write_config(self) -> None:
        """Writes config.json: model, settings and corpus."""
        if jax.process_index() == 0:
            self.workdir.config.write_text(json.dumps(self.describe(), indent=1))

    def describe(self) -> dict[str, Any]:
        """What config.json and every checkpoint say of the run; the model is under "config"."""
        data = {"name": self.config.data, "fingerprint": self.source.fingerprint}
        return {
            "config": self.model.to_dict(),
            "train": self.config.to_dict(),
            "data": data,
        }


def prepare(config: TrainConfig) -> Run:
    """Checks everything about a run that can be checked before its folder is touched.

    Raises:
      ValueError: settings that do not fit each other, the data or the devices.
      FileNotFoundError: no such data.
    """
    model, config = config.model(), config.resolved()
    mesh = make_mesh(config.mesh)
    check_batch(mesh, config.batch_size // config.loss.accumulate)
    schedule = make_schedule(config.optimizer, config.steps)
    optimizer = make_optimizer(config.optimizer, config.steps)
    template = state_template(model, optimizer, mesh)
    with jax.set_mesh(mesh):
        # Traces the model: an engine that cannot run this call says so here.
        tokens = jax.ShapeDtypeStruct((config.batch_size, model.context_length), "int32")
        trace = functools.partial(forward, model, options=config.options())
        jax.eval_shape(trace, template.params, tokens)
    source = open_source(config.data)
    check_vocab(source, model.vocab_size)
    workdir = Workdir(_workdir_path(config))
    return Run(config, model, mesh, source, workdir, schedule, optimizer, template)


def say(text: str) -> None:
    """Prints a line on process 0's standard error, above a progress bar if there is one."""
    if jax.process_index() == 0:
        tqdm.write(text, file=sys.stderr)


def _workdir_path(config: TrainConfig) -> Path:
    if config.workdir is not None:
        return config.workdir
    if jax.process_count() > 1:
        raise ValueError("several processes need one --workdir, a folder that all of them share")
    return Path("runs") / f"{config.preset}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
