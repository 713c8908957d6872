"""Sparse and fused: what each step towards a sparse, shallower model bought and cost.

    python experiments/study_both.py --data corpora/mine
    python experiments/study_both.py --smoke --results runs/smoke      # tiny, on a CPU

A dense SiLU model and a ReLU model with L1 term are trained (the first is that of
experiments/study_fusion.py, if it is under --runs). The second gets the sparse engine, loses the
attentions that matter least, is distilled, gets the feed-forward layers between them fused, is
distilled again, and loses its dead neurons. All are timed in turns in one process. Results are
study_both.csv and .png under --results; the stages lie under --runs, and done ones are skipped. On
one H200 it should take about nine minutes, of which five train the two models.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from sparsejax import surgery
from sparsejax.analysis import NO_ATTENTION, activation_stats, block_scores, fusion_groups
from sparsejax.config import ModelConfig
from sparsejax.data import open_source
from sparsejax.distill.layer_map import layer_map_of
from sparsejax.modules import Options
from sparsejax.studies import shallow_plots
from sparsejax.studies.flags import (
    RESULTS,
    at_least,
    check_folder,
    check_setting,
    check_window,
    own_settings,
    smoke_results,
    with_smoke,
)
from sparsejax.studies.fusing import best_window
from sparsejax.studies.quality import held_out, num_tokens, windows
from sparsejax.studies.records import about, check_same_settings, write_csv
from sparsejax.studies.stages import Recovery, distilled, model_of
from sparsejax.studies.sweep import RunSpec, Setting, compile_cache, train_run
from sparsejax.studies.timing import Model, add_times
from sparsejax.training.launch import run_script
from sparsejax.types import Params

DEFAULT = Setting(layers=24, d_model=512, steps=800)
SMOKE = Setting(layers=3, d_model=32, batch_size=8, seq_len=32, steps=2, evaluations=1)


@dataclasses.dataclass(frozen=True)
class Args:
    """Makes a sparse, fused model step by step.

    Attributes:
      setting: model, data and length of both runs.
      l1: coefficient of the ReLU model, also of its distillations unless --recover-l1 is given.
      window: layers that lose their attention.
      recovery: how models are distilled.
      multiple: what widths without dead neurons are rounded up to.
      analysis_batches: batches of training text that layers and neurons are judged on.
      held_out_batches: of held-out text; None for all.
      rows: sequences of a prefill; decoding is of one row.
      reps: repetitions, in each of which the models take turns.
      results: where the table and the picture go.
      smoke: a tiny model of three layers.
    """

    setting: Annotated[Setting, tyro.conf.arg(name="")] = DEFAULT
    l1: float = 1e-3
    window: int = 9
    recovery: Annotated[Recovery, tyro.conf.arg(name="")] = Recovery()
    multiple: int = 128
    analysis_batches: int = 4
    held_out_batches: int | None = None
    rows: int = 8
    reps: int = 7
    results: Path = RESULTS
    smoke: bool = False


def smoke(args: Args) -> Args:
    """Three layers, all of which lose their attention."""
    args = dataclasses.replace(args, results=smoke_results(args.results))
    setting = dataclasses.replace(SMOKE, runs=args.results / "runs", data=args.setting.data)
    small: dict[str, Any] = {"window": 3, "multiple": 1, "rows": 1, "reps": 2}
    small |= {"analysis_batches": 1, "recovery": Recovery(recover_steps=2), "held_out_batches": 2}
    return with_smoke(args, setting=setting, **small)


def recovery_of(args: Args) -> Recovery:
    """How models are distilled, with the coefficient of the run where none is given."""
    given = args.recovery.recover_l1
    return dataclasses.replace(args.recovery, recover_l1=args.l1 if given is None else given)


class Study:
    """The steps, each of which adds a row and a model to time."""

    def __init__(self, args: Args):
        setting = args.setting
        self.args, self.recovery = args, recovery_of(args)
        rows = min(setting.batch_size, 32)
        self.text = windows(
            open_source(setting.data), setting.seq_len, rows, batches=args.analysis_batches
        )
        self.held = windows(
            open_source(setting.data, "val"), setting.seq_len, rows, batches=args.held_out_batches
        )
        # On a CPU there is no sparse engine to ask for.
        self.sparse = Options(implementation="triton" if jax.default_backend() == "gpu" else "xla")
        told = setting.told() | own_settings(args)
        self.about = about() | {"held_out_tokens": num_tokens(self.held)} | told
        told["device"] = self.about["device"]
        check_same_settings(args.results / "study_both.csv", told)
        self.rows: list[dict[str, Any]] = []
        self.models: dict[str, Model] = {}

    def run(self) -> None:
        """Everything."""
        setting, dense = self.args.setting, Options(implementation="xla")
        self.add("dense SiLU", *model_of(train_run(setting, RunSpec("silu"))), dense)
        parent = train_run(setting, RunSpec("relu", self.args.l1))
        config, params = model_of(parent)
        self.add("ReLU with L1 term", config, params, dense)
        self.add("sparse engine", config, params, self.sparse)
        scores = block_scores(config, params, self.text, [NO_ATTENTION])
        window = best_window(scores.removal("attention"), self.args.window)
        span = f"{window[0]}-{window[-1]}"
        config, params = surgery.remove_attention(config, params, window)
        self.add(f"no attention in {span}", config, params, self.sparse)
        healed = distilled(setting, self.recovery, parent, f"cut-{span}", config, params)
        config, params = model_of(healed)
        self.add("distilled", config, params, self.sparse)
        groups = fusion_groups(config)
        layer_map = layer_map_of(surgery.plan_fusion(config, groups)[1])
        config, params = surgery.fuse_ffns(config, params, groups)
        spans = " ".join(f"{g[0]}-{g[-1]}" for g in groups)
        self.add(f"fused {spans}", config, params, self.sparse)
        name = f"fused-{span}"
        again = distilled(setting, self.recovery, parent, name, config, params, layer_map)
        config, params = model_of(again)
        self.add("distilled again", config, params, self.sparse)
        config, params, report = surgery.drop_dead_neurons(
            config,
            params,
            activation_stats(config, params, self.text),
            multiple=self.args.multiple,
        )
        print(f"{report.work_removed:.1%} of the gate projection is dead", flush=True)
        self.add("dead neurons dropped", config, params, self.sparse)
        length, reps = setting.seq_len // 2, self.args.reps
        shape: dict[str, int] = {"batch": self.args.rows, "steps": min(32, length)}
        add_times(self.rows, self.models, reps=reps, seq_len=length, **shape)

    def add(self, step: str, config: ModelConfig, params: Params, options: Options) -> None:
        """A row with held-out loss and active neurons per token, summed over layers."""
        row = {"step": step, "name": step, "layers": config.num_layers}
        row["ce"] = held_out(config, params, self.held)
        dense = [i for i in config.ffn_layers if i not in config.sparse_layers]
        nnz = float(sum(config.layers[i].ffn.d_ff for i in dense))  # pyright: ignore[reportOptionalMemberAccess]
        if config.sparse_layers:
            nnz += sum(s.mean for s in activation_stats(config, params, self.held).layers)
        self.rows.append(row | {"nnz": nnz} | self.about)
        self.models[step] = Model(config, params, options)
        print(f"{step:24} held-out {row['ce']:.4f} nats, {nnz:.1f} active neurons", flush=True)


def main(args: Args) -> int:
    """Runs what is missing and returns the exit status."""
    args = smoke(args) if args.smoke else args
    check_setting(args.setting)
    check_window(args.window, args.setting)
    at_least(args, 1, "window", "multiple", "analysis_batches", "held_out_batches", "rows", "reps")
    at_least(args.recovery, 1, "recover_steps")
    at_least(args.recovery, 0, "recover_l1")
    at_least(args, 0, "l1")
    check_folder("--results", args.results)
    study = Study(args)
    with compile_cache(args.setting.runs / "compiled"):
        study.run()
    write_csv(args.results / "study_both.csv", study.rows)
    shallow_plots.plot_waterfall(study.rows, args.results / "study_both.png")
    for row in study.rows:
        print(
            f"{row['step']:24} {row['decode_ms']:.3f} ms per decode step, {row['prefill_ms']:.3f} "
            f"ms per prefill, held-out {row['ce']:.4f} nats, {row['nnz']:.1f} active neurons"
        )
    return 0


if __name__ == "__main__":
    run_script(main, Args)
