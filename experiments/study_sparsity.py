"""Sparsity against quality: L1 coefficients, dense baselines, revival, L1 warm-up, two seeds.

    python experiments/study_sparsity.py --data corpora/mine --time-limit 540
    python experiments/study_sparsity.py --smoke --results runs/smoke      # tiny, on a CPU

Every run has a folder under --runs, and its record a line in study_sparsity.jsonl under --results:
a run that has one is not trained again, so the same command goes on where it was left. After each
run the tables (runs, layers, positions, curves as csv) and the picture are made anew.

On one H200 a run of the default size should take about a minute, the whole sweep of two seeds about
40: with --time-limit 540 no run begins after nine minutes.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Annotated, Any

import tyro

from sparsejax.studies import plots
from sparsejax.studies.flags import (
    RESULTS,
    at_least,
    check_folder,
    check_setting,
    not_empty,
    smoke_results,
    with_smoke,
)
from sparsejax.studies.records import Budget, Records, write_csv
from sparsejax.studies.sweep import RunSpec, Setting, compile_cache, run_record, select, train_run
from sparsejax.training.launch import run_script

SMOKE = Setting(layers=1, d_model=32, batch_size=8, seq_len=32, steps=4, evaluations=2)


@dataclasses.dataclass(frozen=True)
class Args:
    """Trains what has no record yet, and makes tables and a picture of all records.

    Attributes:
      setting: model, data and length of the runs.
      l1: coefficients of the gated ReLU model; 0 is the dense ReLU baseline.
      nongated_l1: those of the model without gate.
      helped_l1: those that are also run with revival of dead neurons, and with L1 warm-up.
      revive: share of fresh noise mixed into dead neurons.
      warmup: share of the steps without L1 term, and of those over which it then grows.
      long: times as many steps in two further runs, to see overfitting: SiLU, and the first of
        helped_l1. 0 leaves them out.
      seeds: each run once per seed; the long ones take the first.
      only: names of runs, such as silu or relu-0.001-revive; empty for all.
      time_limit: seconds after which no run begins.
      results: where records, tables and the picture go.
      smoke: a tiny model and three runs.
    """

    setting: Annotated[Setting, tyro.conf.arg(name="")] = Setting()
    l1: tuple[float, ...] = (0.0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    nongated_l1: tuple[float, ...] = (0.0, 3e-4, 1e-3)
    helped_l1: tuple[float, ...] = (1e-3, 3e-3)
    revive: float = 0.1
    warmup: float = 1 / 6
    long: int = 5
    seeds: tuple[int, ...] = (0, 1)
    only: tuple[str, ...] = ()
    time_limit: float | None = None
    results: Path = RESULTS
    smoke: bool = False

    def specs(self) -> list[RunSpec]:
        """The runs, seed by seed."""
        found = []
        for seed in self.seeds:
            found.append(RunSpec("silu", seed=seed))
            found += [RunSpec("relu", c, seed=seed) for c in self.l1]
            found += [RunSpec("nongated", c, seed=seed) for c in self.nongated_l1]
            for c in self.helped_l1:
                found.append(RunSpec("relu", c, revive=self.revive, seed=seed))
                found.append(RunSpec("relu", c, warmup=self.warmup, seed=seed))
        if self.long > 1:
            further: dict[str, Any] = {"length": self.long, "seed": self.seeds[0]}
            found.append(RunSpec("silu", **further))
            found += [RunSpec("relu", c, **further) for c in self.helped_l1[:1]]
        return found


def smoke(args: Args) -> Args:
    """SiLU, and two coefficients that share one program."""
    args = dataclasses.replace(args, results=smoke_results(args.results))
    setting = dataclasses.replace(
        SMOKE, runs=args.results / "runs", data=args.setting.data, implementation="xla"
    )
    return with_smoke(
        args,
        setting=setting,
        l1=(0.0, 1e-2),
        nongated_l1=(),
        helped_l1=(),
        long=0,
        seeds=(0,),
    )


def report(records: Records, setting: Setting, results: Path) -> None:
    """Tables and the picture of everything recorded with this setting."""
    rows = records.all(**setting.key())
    shown = [
        {k: v for k, v in {**r["key"], **r}.items() if not isinstance(v, list | dict)} for r in rows
    ]
    write_csv(results / "study_sparsity_runs.csv", shown)

    def each(name: str) -> list[dict[str, Any]]:
        return [
            {"name": r["name"], "seed": r["key"]["seed"]}
            | {k: v for k, v in entry.items() if not isinstance(v, list)}
            for r in rows
            for entry in r.get(name, [])
        ]

    for table, name in {
        "layers": "layer_stats",
        "positions": "positions",
        "curves": "curve",
    }.items():
        write_csv(results / f"study_sparsity_{table}.csv", each(name))
    plots.plot_sparsity(rows, results / "study_sparsity.png")


def main(args: Args) -> int:
    """Runs what is missing and returns the exit status."""
    args = smoke(args) if args.smoke else args
    check_setting(args.setting)
    not_empty(args, "seeds")
    at_least(args, 0, "seeds", "long", "revive", "warmup", "time_limit")
    if args.warmup > 0.5:
        raise ValueError(
            "--warmup is the share of the steps without the L1 term, and again of those over which "
            f"it grows: at most 0.5, got {args.warmup}"
        )
    check_folder("--results", args.results)
    setting, budget = args.setting, Budget(args.time_limit)
    records = Records(args.results / "study_sparsity.jsonl")
    wanted = list(dict.fromkeys(select(args.specs(), args.only)))
    keys = [setting.key() | dataclasses.asdict(spec) for spec in wanted]
    missing = [(s, k) for s, k in zip(wanted, keys, strict=True) if records.find(k) is None]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} runs have a record", flush=True)
    with compile_cache(setting.runs / "compiled"):
        for number, (spec, key) in enumerate(missing):
            if budget.spent:
                left = len(missing) - number
                print(f"time is up; {left} runs are left, the same command goes on with them")
                break
            print(f"--- {spec.name}, seed {spec.seed}", flush=True)
            train_run(setting, spec)
            found = records.add(key, {"name": spec.name} | run_record(setting, spec))
            print(
                f"{spec.name}, seed {spec.seed}: held-out {found['ce']:.4f} nats (best "
                f"{found['best_ce']:.4f} at step {found['best_step']}), nnz {found['nnz']:.1f}, "
                f"{found['tokens_per_s']:,.0f} tokens/s",
                flush=True,
            )
            report(records, setting, args.results)
    if not missing:
        report(records, setting, args.results)
    for name, rows in itertools.groupby(records.all(**setting.key()), lambda r: r["name"]):
        shown = "  ".join(f"{r['ce']:.4f} (nnz {r['nnz']:.1f})" for r in rows)
        print(f"{name:24} {shown}")
    return 0


if __name__ == "__main__":
    run_script(main, Args)
