"""The training loop: one function for a laptop, the GPUs of a host, or several hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from sparsejax.data import Batch, Loader
from sparsejax.hardware import memory_limit, utilisation
from sparsejax.model import flops_per_token
from sparsejax.modules import Options
from sparsejax.params import count
from sparsejax.training.activity import report_activity
from sparsejax.training.checkpoint import Checkpointer, NonFiniteStateError
from sparsejax.training.config import TrainConfig
from sparsejax.training.evaluate import evaluate, to_device
from sparsejax.training.fit import compile_fitting
from sparsejax.training.interrupt import Interrupt
from sparsejax.training.metrics import MetricsLog, Speed, headline, read_rows, to_row
from sparsejax.training.objective import Objective
from sparsejax.training.plots import plot_run
from sparsejax.training.processes import from_process_0
from sparsejax.training.run import Run, prepare, say
from sparsejax.training.state import TrainState
from sparsejax.training.step import Metrics, make_eval_step, make_train_step
from sparsejax.types import Params


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient norm is NaN or infinite; nothing was saved after it."""


def train(
    config: TrainConfig, make_objective: Callable[[Run], Objective | None] | None = None
) -> dict[str, Any]:
    """Trains as `config` says; returns what summary.json holds.

    In a launch of several processes every process calls this with the same config, after
    `sparsejax.distributed.initialize`.

    Args:
      config: the settings.
      make_objective: what is minimised besides the sparsity term, for a run whose settings fit each
        other; None, or a result of None, for the cross-entropy of the next token.

    Raises:
      ValueError: settings that do not fit each other, the data, the devices, the folder or the
        checkpoint (the message says which); nothing is lost.
      FileNotFoundError: no such data, or `resume` without a whole checkpoint.
      NonFiniteLossError: names the step and the last good checkpoint.
    """
    run = prepare(config)
    if make_objective is not None:
        run = dataclasses.replace(run, objective=make_objective(run))
    run.check_processes()
    with run.loader(run.source) as loader, contextlib.ExitStack() as lock:
        run.take_workdir(lock)
        checkpointer = Checkpointer(run.workdir.checkpoints, keep=config.keep)
        with checkpointer, jax.set_mesh(run.mesh):
            state = run.start(checkpointer, loader)
            if summary := from_process_0(lambda: _summary_of_a_done_run(run, int(state.step))):
                say(f"nothing to do: the run has done {summary['step']} steps")
                return summary
            run.write_config(int(state.step))
            resumed = int(state.step) if config.resume else None
            with (
                MetricsLog(run.workdir.metrics, resumed) as log,
                MetricsLog(run.workdir.root / "eval.jsonl", resumed) as eval_log,
            ):
                summary = _Trainer(run, loader, checkpointer, state, log, eval_log).fit()
                summary["resumed_from"] = resumed or 0
        if jax.process_index() == 0:
            rows = read_rows(run.workdir.metrics)
            summary |= {"first": rows[0], "last": rows[-1]} if rows else {}
            run.workdir.summary.write_text(json.dumps(summary, indent=1))
            plot_run(rows, run.workdir.plots)
    return summary


def _summary_of_a_done_run(run: Run, step: int) -> dict[str, Any] | None:
    """What an earlier call wrote, if it ended at `step` and nothing is left to do after it."""
    if step < run.last_step or not run.workdir.summary.exists():
        return None
    summary = json.loads(run.workdir.summary.read_text())
    return summary if summary.get("step") == step else None


class _Trainer:
    """Runs the steps. Metrics are read one step late, so that the device never waits for them."""

    def __init__(
        self,
        run: Run,
        loader: Loader,
        checkpointer: Checkpointer,
        state: TrainState,
        log: MetricsLog,
        eval_log: MetricsLog,
    ):
        self.run, self.config = run, run.config
        self.loader, self.checkpointer = loader, checkpointer
        self.state, self.step = state, int(state.step)
        self.log, self.eval_log = log, eval_log
        frozen = None if run.objective is None else run.objective.frozen
        self.frozen = () if frozen is None else (frozen,)
        chunk, options = self.config.loss.vocab_chunk, self.config.options()
        self.eval_step = make_eval_step(run.model, chunk, options, run.mesh, run.objective)
        self._note_missing_rows(resumed=self.config.resume and self.step > 0)

    def _note_missing_rows(self, resumed: bool) -> None:
        every, last = self.config.log_every, self.log.last_step
        expected = max(self.step - self.step % every, 1)
        if resumed and jax.process_index() == 0 and last < expected:
            say(
                f"note: metrics.jsonl ends at step {last}, the checkpoint is of step {self.step}: "
                "the rows between are lost (the file was cut or removed)"
            )

    def fit(self) -> dict[str, Any]:
        """Runs to the end, to `stop_at`, or to a signal; always ends on a checkpoint."""
        config, steps = self.config, self.config.steps
        summary: dict[str, Any] = {"parameters": count(self.state.params)}
        if self.step < self.run.last_step:
            evaluated = from_process_0(lambda: self.eval_log.last_step)
            if self._evaluation_due() and evaluated < self.step:
                self._evaluate()  # the run ended between this checkpoint and its evaluation
            summary |= self._steps()
        # What follows is not protected against a signal: the last checkpoint must be whole first.
        self.checkpointer.wait()
        summary |= {
            "status": "finished" if self.step >= steps else "stopped",
            "step": self.step,
            "workdir": str(self.run.workdir.root),
            "tokens": self.step * config.batch_size * self.run.seq_len,
            "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "versions": {n: importlib.metadata.version(n) for n in ("jax", "flax", "optax")},
        }
        if self.step >= steps:
            summary["held_out"] = held_out = self._evaluate()
            if held_out and np.isfinite(held_out["ce"]):
                summary["activations"] = report_activity(self.run, self.state.params)
        else:
            say(
                f"stopped after step {self.step} of {steps}; go on with "
                f"--workdir {self.run.workdir.root} --resume"
            )
        return summary

    def _steps(self) -> dict[str, Any]:
        config = self.config
        first = next(self.loader)
        step_fn, summary = self._compile(first)
        began = time.perf_counter()
        self._speed = Speed(config.batch_size * self.run.seq_len, self.step)
        pending: tuple[int, Metrics] | None = None
        bar = tqdm(
            total=config.steps, initial=self.step, unit="step", dynamic_ncols=True, disable=None
        )
        with bar, Interrupt() as interrupt:
            for batch in itertools.chain([first], self.loader):
                placed = to_device(self.run.mesh, batch)
                self.state, metrics = step_fn(self.state, placed, *self.frozen)
                self.step += 1
                if pending:
                    self._record(*pending, bar)
                pending = (self.step, metrics)
                signal = interrupt.requested(self.step)
                stop = signal is not None or self.step == self.run.last_step
                if stop or self.step % config.checkpoint_every == 0:
                    # Nothing is saved before its own metrics are known to be finite.
                    self._record(*pending, bar)
                    pending = None
                    with self._speed.paused():
                        self._save()
                if self._evaluation_due() and signal is None:
                    with self._speed.paused():
                        self._evaluate()
                if stop:
                    if signal:
                        say(f"{signal}: saved step {self.step}")
                    break
        summary["train_s"] = time.perf_counter() - began
        stats = jax.local_devices()[0].memory_stats() or {}
        return summary | {"allocator_peak_bytes": stats.get("peak_bytes_in_use")}

    def _evaluation_due(self) -> bool:
        every = self.config.eval_every
        return bool(every) and 0 < self.step < self.config.steps and self.step % every == 0

    def _compile(self, batch: Batch) -> tuple[Any, dict[str, Any]]:
        """Compiles ahead: its time and memory are reported, and the bar shows training only."""
        began, run = time.perf_counter(), self.run
        name = self.config.preset or self.config.init_from
        say(f"compiling {name} for {run.mesh.size} device(s)")
        placed = to_device(run.mesh, batch)

        def lower(options: Options) -> Any:
            step_fn = make_train_step(
                run.model,
                run.optimizer,
                run.schedule,
                self.config.loss,
                options,
                run.mesh,
                self.config.seed,
                run.objective,
            )
            return step_fn.lower(self.state, placed, *self.frozen)

        limit = from_process_0(memory_limit)  # all processes have to choose alike
        compiled, options = compile_fitting(lower, run.model, self.config.options(), limit)
        seconds = time.perf_counter() - began
        if options.residuals == "compact" != self.config.residuals:
            say("the step keeps compact residuals: full ones do not fit into the device's memory")
        say(
            f"{count(self.state.params):,} parameters on {jax.device_count()} x "
            f"{jax.devices()[0].device_kind}, compiled in {seconds:.1f} s; "
            f"writing to {run.workdir.root}"
        )
        sizes = compiled.memory_analysis()
        names = ("argument_size_in_bytes", "temp_size_in_bytes", "output_size_in_bytes")
        return compiled, {
            "compile_s": seconds,
            "compiled_bytes": {n.removesuffix("_in_bytes"): getattr(sizes, n) for n in names},
        }

    def _record(self, step: int, metrics: Metrics, bar: tqdm) -> None:
        """Waits for a step, checks that it is finite, and logs it if it is one to log."""
        loss, grad_norm = (float(metrics[k]) for k in ("loss", "grad_norm"))
        if not np.isfinite([loss, grad_norm]).all():
            raise self._non_finite(f"step {step}: loss {loss}, gradient norm {grad_norm}")
        if not metrics["targets"]:
            raise ValueError(
                f"step {step}: the batch has no target to learn from; with --mask-documents every "
                "document in it is one token long. Use other data, or leave the flag out"
            )
        bar.update()
        if step != 1 and step % self.config.log_every and step != self.config.steps:
            return
        row = to_row(step, metrics, self._speed.lap(step))
        self.log.write(row)
        flops = flops_per_token(self.run.model, self.run.seq_len)
        mfu = utilisation(flops, row["tokens_per_s"], jax.device_count())
        shown = f"{headline(row)}  nnz {row['nnz']:.1f}  {row['tokens_per_s']:,.0f} tok/s"
        shown += "" if mfu is None else f"  MFU {mfu:.1%}"
        bar.set_postfix_str(shown)
        if bar.disable:
            say(f"step {step}/{self.config.steps}  {shown}")

    def _save(self) -> None:
        extra = self.run.describe() | {"loader": self.loader.state()}
        try:
            self.checkpointer.save(self.step, self.state, extra)
        except NonFiniteStateError as error:
            # The update itself overflowed: its own loss was still finite.
            raise self._non_finite(str(error)) from error

    def _non_finite(self, what: str) -> NonFiniteLossError:
        self.checkpointer.wait()
        good = self.checkpointer.latest_step()
        saved = "none yet" if good is None else f"step {good} in {self.run.workdir.checkpoints}"
        return NonFiniteLossError(
            f"{what}. Nothing was saved after it; last good checkpoint: {saved}. "
            f"{'Start again' if good is None else 'Go on from it'} with --resume and a lower "
            "--learning-rate or --l1-coeff"
        )

    def _evaluate(self) -> dict[str, Any] | None:
        """Held-out loss now, also written to eval.jsonl; None where the corpus has no val split."""
        source = self.run.val_source
        if source is None:
            return None
        with self.run.loader(
            source, num_epochs=1, shuffle=False, drop_remainder=False, worker_count=0
        ) as loader:
            batches = itertools.islice(loader, self.config.eval_batches)
            params = self.state.params

            def eval_step(params: Params, batch: Any) -> Metrics:
                return self.eval_step(params, batch, *self.frozen)

            result = evaluate(eval_step, params, self.run.mesh, batches, source)
        if not result["tokens"]:
            say(f"step {self.step}: the held-out batches have no target; nothing was evaluated")
            return None
        self.eval_log.write({"step": self.step} | result)
        say(
            f"step {self.step}: held-out cross-entropy {result['ce']:.4f} nats per token, "
            f"{result['bits_per_byte']:.4f} bits per byte, {result['nnz']:.1f} active neurons"
        )
        return result
