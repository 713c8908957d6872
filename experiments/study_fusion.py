"""FFN fusion: what depends on what, what fusing costs and saves, and what distillation recovers.

    python experiments/study_fusion.py --data corpora/mine
    python experiments/study_fusion.py --smoke --results runs/smoke      # tiny, on a CPU

A deep, narrow model is trained; the run of layers whose attentions matter least loses them and is
healed by distillation; its feed-forward layers are fused, removed and reordered in every way; the
models with the most fused of them, and with as many removed, are distilled again. Folders under
--runs hold the stages: done ones are skipped, so the same command goes on. Held-out losses go to
study_fusion.csv, the dependency matrices to study_fusion_dependency*.csv and .png, all of it under
--results. On one H200 it should take about eight minutes, of which the first three train the
parent.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from sparsejax import surgery
from sparsejax.analysis import (
    NO_ATTENTION,
    NO_FFN,
    block_dependency,
    block_scores,
    parallel_windows,
)
from sparsejax.analysis.plots import plot_dependency
from sparsejax.data import open_source
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
from sparsejax.studies.fusing import Change, best_window, changes
from sparsejax.studies.quality import held_out, num_tokens, windows
from sparsejax.studies.records import about, check_same_settings, write_csv
from sparsejax.studies.stages import Recovery, distilled, model_of
from sparsejax.studies.sweep import RunSpec, Setting, compile_cache, train_run
from sparsejax.studies.timing import Model, add_times
from sparsejax.training.launch import run_script

DEFAULT = Setting(layers=24, d_model=512, steps=800)
TIMED = ("parent", "base", "fuse", "remove")
SMOKE = Setting(layers=3, d_model=32, batch_size=8, seq_len=32, steps=2, evaluations=1)


@dataclasses.dataclass(frozen=True)
class Args:
    """Trains a deep model, then fuses a run of its feed-forward layers in every way.

    Attributes:
      setting: model, data and length of the parent's run.
      window: layers that lose their attention.
      sizes: feed-forward layers per group.
      analysis_batches: batches of training text that layers are scored on.
      recovery: how models are distilled.
      window_lengths: layers per window of full-block parallelisation.
      window_count: at most so many windows.
      held_out_batches: of held-out text; None for all.
      reps: repetitions of latency measurements, in each of which the models take turns.
      results: where tables and pictures go.
      smoke: a tiny model of three layers.
    """

    setting: Annotated[Setting, tyro.conf.arg(name="")] = DEFAULT
    window: int = 9
    sizes: tuple[int, ...] = (2, 4, 8)
    analysis_batches: int = 4
    recovery: Annotated[Recovery, tyro.conf.arg(name="")] = Recovery()
    window_lengths: tuple[int, ...] = (2, 4)
    window_count: int = 4
    held_out_batches: int | None = None
    reps: int = 7
    results: Path = RESULTS
    smoke: bool = False


def smoke(args: Args) -> Args:
    """Three layers, all of which lose their attention."""
    args = dataclasses.replace(args, results=smoke_results(args.results))
    setting = dataclasses.replace(SMOKE, runs=args.results / "runs", data=args.setting.data)
    small: dict[str, Any] = {"window": 3, "sizes": (2,), "window_lengths": (2,), "window_count": 1}
    small |= {
        "analysis_batches": 1,
        "recovery": Recovery(recover_steps=2),
        "held_out_batches": 2,
        "reps": 2,
    }
    return with_smoke(args, setting=setting, **small)


class Study:
    """The steps of the study, each of which adds rows."""

    def __init__(self, args: Args):
        setting = args.setting
        self.args = args
        rows = min(setting.batch_size, 32)
        self.text = windows(
            open_source(setting.data), setting.seq_len, rows, batches=args.analysis_batches
        )
        self.held = windows(
            open_source(setting.data, "val"), setting.seq_len, rows, batches=args.held_out_batches
        )
        told = setting.told() | own_settings(args)
        self.about = about() | {"held_out_tokens": num_tokens(self.held)} | told
        told["device"] = self.about["device"]
        check_same_settings(args.results / "study_fusion.csv", told)
        self.rows: list[dict[str, Any]] = []
        self.windows: list[dict[str, Any]] = []
        self.timed: dict[str, Model] = {}

    def run(self) -> None:
        """Everything."""
        args = self.args
        parent = train_run(args.setting, RunSpec("silu"))
        config, params = model_of(parent)
        self.add("parent", "parent", config, params, timed=True)
        dependency = self.dependency("parent", config, params, "block")
        self.side_by_side(dependency, config, params)
        scores = block_scores(config, params, self.text, [NO_ATTENTION])
        window = best_window(scores.removal("attention"), args.window)
        cut = surgery.remove_attention(config, params, window)
        span = f"{window[0]}-{window[-1]}"
        self.add("cut", "cut", *cut, groups=span)
        healed = distilled(args.setting, args.recovery, parent, f"cut-{span}", *cut)
        config, params = model_of(healed)
        self.add("base", "base", config, params, timed=True)
        self.dependency("base", config, params, "ffn")
        removal = block_scores(config, params, self.text, [NO_FFN]).removal("ffn")
        losses = {i: float(removal[i]) for i in window}
        most: Change | None = None
        removed: dict[int, Change] = {}
        for way in changes(config, params, window, losses, args.sizes):
            more = {"saved": way.saved, "order_of": way.beside, "groups": way.where}
            timed = way.family in TIMED
            self.add(way.name, way.family, way.config, way.params, timed, **more)
            inside = window[-1] not in way.groups[-1]
            if way.family == "fuse" and inside and (most is None or way.saved > most.saved):
                most = way
            if way.family == "remove":
                removed[way.saved] = way
        if most is not None:
            for way in (most, removed[most.saved]):
                name = way.name.replace(" ", "-") + f"-{span}"
                again = distilled(
                    args.setting, args.recovery, parent, name, way.config, way.params, way.layer_map
                )
                family = f"{way.family}, distilled"
                self.add(f"{way.name}, distilled", family, *model_of(again), saved=way.saved)
            # As many updates more, without fusion: what the updates alone are worth.
            control = distilled(
                args.setting, args.recovery, parent, f"again-{span}", config, params
            )
            self.add("base, distilled", "base, distilled", *model_of(control))
        untrained = [row for row in self.rows if row["family"] in TIMED]
        shape = {"seq_len": args.setting.seq_len // 2, "steps": min(32, args.setting.seq_len // 2)}
        add_times(untrained, self.timed, reps=args.reps, **shape)

    def add(
        self, name: str, family: str, config: Any, params: Any, timed: bool = False, **more: Any
    ) -> None:
        """A row with the held-out loss; `timed` models are kept."""
        row = {"name": name, "family": family, "layers": config.num_layers, "saved": 0} | more
        row |= {"ce": held_out(config, params, self.held)}
        self.rows.append({"order_of": row["saved"]} | row | self.about)
        print(f"{name:20} {family:20} held-out {row['ce']:.4f} nats", flush=True)
        if timed:
            self.timed[name] = Model(config, params)

    def dependency(self, name: str, config: Any, params: Any, part: Any) -> Any:
        """The matrix, also as table and picture."""
        found = block_dependency(config, params, self.text, part=part)
        self.args.results.mkdir(parents=True, exist_ok=True)
        path = self.args.results / f"study_fusion_dependency_{name}"
        found.to_csv(path.with_suffix(".csv"))
        plot_dependency(found, path.with_suffix(".png"))
        return found

    def side_by_side(self, dependency: Any, config: Any, params: Any) -> None:
        """Rows with more and more windows of whole layers that read one input."""
        for length in self.args.window_lengths:
            chosen = parallel_windows(dependency, config, length, self.args.window_count)
            for count in range(len(chosen) + 1):
                now = sorted(chosen[:count])
                ce = held_out(*surgery.parallelize_blocks(config, params, now), self.held)
                row = {"length": length, "count": count, "ce": ce}
                row |= {"windows": " ".join(f"{w[0]}-{w[-1]}" for w in now)}
                self.windows.append(row | self.about)
                print(f"{count} windows of {length} layers: held-out {ce:.4f} nats", flush=True)


def main(args: Args) -> int:
    """Runs what is missing and returns the exit status."""
    args = smoke(args) if args.smoke else args
    check_setting(args.setting)
    check_window(args.window, args.setting)
    at_least(args, 1, "window", "sizes", "analysis_batches", "held_out_batches", "reps")
    at_least(args, 1, "window_lengths", "window_count")
    at_least(args.recovery, 1, "recover_steps")
    at_least(args.recovery, 0, "recover_l1")
    check_folder("--results", args.results)
    study = Study(args)
    with compile_cache(args.setting.runs / "compiled"):
        study.run()
    write_csv(args.results / "study_fusion.csv", study.rows)
    write_csv(args.results / "study_fusion_windows.csv", study.windows)
    shallow_plots.plot_fusion(study.rows, study.windows, args.results / "study_fusion.png")
    base = next(row for row in study.rows if row["family"] == "base")
    for row in (row for row in study.rows if "decode_ms" in row):
        speedup = base["decode_ms"] / row["decode_ms"]
        print(f"{row['name']:20} {row['decode_ms']:.3f} ms per decode step, x{speedup:.3f}")
    return 0


if __name__ == "__main__":
    run_script(main, Args)
