"""What one training run is made of: checked settings, model, mesh, corpus and folder."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from tqdm import tqdm

from sparsejax.config import ModelConfig, config_differences
from sparsejax.data import (
    DataNotFoundError,
    Loader,
    TokenSource,
    check_vocab,
    make_loader,
    open_source,
)
from sparsejax.data.token_ids import read_token_ids, write_token_ids
from sparsejax.model import forward
from sparsejax.sharding import check_batch, make_mesh
from sparsejax.training.checkpoint import Checkpointer
from sparsejax.training.config import TrainConfig
from sparsejax.training.evaluate import process_block
from sparsejax.training.initial import (
    check_tokenizer,
    folder_kind,
    initial_config,
    initial_params,
    initial_tokenizer,
    saved_config,
    weights_digest,
)
from sparsejax.training.objective import Objective
from sparsejax.training.optimizer import make_optimizer, make_schedule
from sparsejax.training.processes import from_all_processes, from_process_0
from sparsejax.training.state import (
    TrainState,
    sharded_state,
    state_from_params,
    state_template,
)
from sparsejax.training.workdir import Workdir, WorkdirLock

# Settings that a resumed run may change without a remark.
_FREE_TO_CHANGE = ("resume", "stop_at", "workdir", "mesh")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose arguments fit each other; made by `prepare`, which touches no file."""

    config: TrainConfig
    model: ModelConfig
    mesh: Mesh
    source: TokenSource
    val_source: TokenSource | None
    workdir: Workdir
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    template: TrainState
    objective: Objective | None = None

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        return self.config.seq_len or self.model.context_length

    @property
    def last_step(self) -> int:
        """The step this call ends after: the run's last, or `stop_at` before it."""
        stop_at = self.config.stop_at
        return self.config.steps if stop_at is None else min(stop_at, self.config.steps)

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

    def check_processes(self) -> None:
        """Raises on all processes unless all of them were started with the same settings."""
        ours = self.describe()
        differing = config_differences(ours, from_process_0(self.describe))
        index = jax.process_index()
        found = [f"process {index} vs process 0: {line}" for line in differing]
        if problems := [p for p in from_all_processes("; ".join(found)) if p]:
            raise ValueError(
                "all processes of a launch need the same flags and data; " + "; ".join(problems)
            )

    def take_workdir(self, lock: contextlib.ExitStack) -> None:
        """Locks the folder and checks that a new run does not mix with an old one there.

        Process 0 looks, and all processes raise what it finds.
        """
        from_process_0(lambda: self._take_workdir(lock))

    def _take_workdir(self, lock: contextlib.ExitStack) -> None:
        root, resume = self.workdir.root, self.config.resume
        files = (self.workdir.config, self.workdir.metrics, self.workdir.checkpoints)
        exists = any(file.exists() for file in files)
        if resume and not exists:
            raise FileNotFoundError(
                f"{root} holds no run to resume; leave out --resume to start one"
            )
        lock.enter_context(WorkdirLock(root))
        if exists and not resume:
            raise ValueError(
                f"{root} already holds a run; pass --resume to go on with it (or to start it over, "
                "if it never saved), or another --workdir"
            )

    def start(self, checkpointer: Checkpointer, loader: Loader) -> TrainState:
        """A fresh state, or with `resume` the newest whole checkpoint and the data's position."""
        never_saved = self.config.resume and checkpointer.is_empty()
        if never_saved:
            say(f"{self.workdir.root} was left before its first checkpoint; starting from step 0")
        if never_saved or not self.config.resume:
            return self._fresh_state()
        restored = checkpointer.restore(self.template, expected_config=self.model.to_dict())
        loader.restore(restored.extra["loader"])
        say(f"resumed {self.workdir.root} after step {restored.step}")
        was = restored.extra["train"]
        for line in config_differences(was, self.config.to_dict()):
            if not line.startswith(_FREE_TO_CHANGE):
                say(f"note: this setting differs from the run so far (was vs now): {line}")
        about = [] if self.objective is None else [self.objective.describe()]
        for line in config_differences([restored.extra.get("objective")][: len(about)], about):
            say(f"note: the objective differs from the run so far (was vs now): {line}")
        return restored.state

    def _fresh_state(self) -> TrainState:
        if self.config.init_from is None:
            return sharded_state(self.model, self.optimizer, self.mesh, self.config.seed)
        say(f"reading the weights of {self.config.init_from}")
        found = initial_config(self.config.init_from)
        params = initial_params(self.config.init_from, self.mesh)
        _, params = self.config.change_init(found, params)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.template)
        return state_from_params(params, self.optimizer, shardings)

    def write_config(self, step: int) -> None:
        """Writes config.json: model, settings, corpus; and with --init-from what came from there.

        Args:
          step: updates done; behind the first, that folder may be gone or hold something else.
        """
        about, init = self.describe(), self.config.init_from
        if init is not None and step == 0:
            about["init_digest"] = weights_digest(init)  # by all processes together
        if jax.process_index() != 0:
            return
        if "init_digest" in about:
            given = Path(init or "")
            ids = read_token_ids(given / "tokenizer" if folder_kind(given) == "run" else given)
            if ids:
                self.workdir.tokenizer.mkdir(exist_ok=True)
                write_token_ids(self.workdir.tokenizer, ids)
        elif self.workdir.config.exists():
            before = json.loads(self.workdir.config.read_text())
            if "init_digest" in before:
                about["init_digest"] = before["init_digest"]
        # Whole or not at all: a later start reads it.
        temporary = self.workdir.config.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(about, indent=1))
        os.replace(temporary, self.workdir.config)

    def describe(self) -> dict[str, Any]:
        """What config.json and every checkpoint say of the run; the model is under "config"."""
        data = {"name": self.config.data, "fingerprint": self.source.fingerprint}
        about = {} if self.objective is None else {"objective": self.objective.describe()}
        return {
            "config": self.model.to_dict(),
            "train": self.config.to_dict(),
            "data": data,
            **about,
        }


def prepare(config: TrainConfig) -> Run:
    """Checks everything about a run that can be checked before its folder is touched.

    Raises:
      ValueError: settings that do not fit each other, the data or the devices.
      FileNotFoundError: no such data.
    """
    model, config = config.model(), config.resolved()
    mesh = make_mesh(config.mesh)
    check_batch(mesh, config.batch_size, config.loss.accumulate)
    schedule = make_schedule(config.optimizer, config.steps)
    optimizer = make_optimizer(config.optimizer, config.steps)
    template = state_template(model, optimizer, mesh)
    with jax.set_mesh(mesh):
        # Traces the model: an engine that cannot run this call says so here.
        tokens = jax.ShapeDtypeStruct((config.batch_size, model.context_length), "int32")
        trace = functools.partial(forward, model, options=config.options())
        jax.eval_shape(trace, template.params, tokens)
    assert config.data is not None  # resolved
    say(f"reading {config.data}")
    source = open_source(config.data)
    goes_on = config.resume and config.workdir and saved_config(config.workdir)
    if config.init_from is not None and not goes_on:  # which no longer needs that folder
        check_tokenizer(source, initial_tokenizer(config.init_from), str(config.init_from))
    check_vocab(source, model.vocab_size)
    val_source = _open_val(config.data, config.seq_len or model.context_length, model)
    workdir = Workdir(_workdir_path(config))
    return Run(config, model, mesh, source, val_source, workdir, schedule, optimizer, template)


def _open_val(data: str, seq_len: int, model: ModelConfig) -> TokenSource | None:
    """Held-out text, or None (and a remark) where there is none, or less than a window of it."""
    try:
        source = open_source(data, "val")
    except DataNotFoundError as error:
        say(f"note: nothing will be evaluated on held-out text: {error}")
        return None
    if len(source.tokens) <= seq_len:
        say(
            f"note: nothing will be evaluated on held-out text: {source.label} has "
            f"{len(source.tokens)} tokens, a window needs {seq_len + 1}"
        )
        return None
    check_vocab(source, model.vocab_size)
    return source


def say(text: str) -> None:
    """Prints a line on process 0's standard error, above a progress bar if there is one."""
    if jax.process_index() == 0:
        tqdm.write(text, file=sys.stderr)


def _workdir_path(config: TrainConfig) -> Path:
    if config.workdir is not None:
        for place in (config.workdir, *config.workdir.parents):
            if place.exists() and not place.is_dir():
                raise ValueError(f"--workdir {config.workdir}: {place} is a file; name a folder")
        return config.workdir
    if jax.process_count() > 1:
        raise ValueError("several processes need one --workdir, a folder that all of them share")
    name = Path(config.preset or config.init_from or "").name.removesuffix(".json")
    return Path("runs") / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
