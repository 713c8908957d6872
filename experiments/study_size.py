"""Size: gain of the sparse engine over the fastest dense form, for the published model sizes.

    python experiments/study_size.py --presets 0.5b 1b
    python experiments/study_size.py --smoke --results runs/smoke      # tiny, on a CPU

Weights are random. Gate biases give every layer the activity of a trained model: the densities of
`sparsejax.calibrate.MEASURED`, layer by depth, at each model's width. "forward" reads prompts,
fills the cache and chooses one token per row (the published forward pass has neither head nor
cache); "training" is an update. Measurements are lines of study_size.jsonl under --results; what
has one is not measured again, and the table and the picture are made of all. One size should take
one to three minutes on one H200, all four some eight.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from sparsejax import benchmark, presets
from sparsejax.calibrate import measured_profile
from sparsejax.studies import plots
from sparsejax.studies.flags import (
    RESULTS,
    at_least,
    check_folder,
    check_gpu,
    first_layers,
    not_empty,
    smoke_results,
    with_smoke,
)
from sparsejax.studies.records import Budget, Records, write_csv
from sparsejax.studies.timing import time_variants
from sparsejax.training.launch import run_script

SIZES = ("0.5b", "1b", "1.5b", "2b")
# Percent more tokens per second of the sparse model at L1 = 2e-5, eight H100 cards, arXiv
# 2603.23198, table 1. The 2b training row compares different micro-batches.
PUBLISHED: dict[str, dict[str, float]] = {
    "forward": dict(zip(SIZES, (17.0, 18.1, 18.8, 20.5), strict=True)),
    "training": dict(zip(SIZES, (-1.5, 7.1, 11.6, 21.9), strict=True)),
}
_MODES: dict[str, Literal["prefill", "train"]] = {"forward": "prefill", "training": "train"}


@dataclasses.dataclass(frozen=True)
class Args:
    """Times the published sizes.

    Attributes:
      presets: which.
      modes: forward, training.
      batch_size: sequences.
      seq_len: tokens per sequence.
      remat: as in experiments/train.py.
      layers: use only the first so many layers.
      pattern: whether a layer's neurons fire equally often or by a power law.
      reps: repetitions, in each of which the variants take turns.
      calls: calls per repetition.
      energy_seconds: how long each variant runs for its energy.
      time_limit: seconds after which no size begins.
      results: where records, the table and the picture go.
      smoke: one layer of the tiny preset, forward only.
    """

    presets: tuple[str, ...] = SIZES
    modes: tuple[str, ...] = ("forward", "training")
    batch_size: int = 8
    seq_len: int = 2048
    remat: Literal["none", "dots", "full"] = "none"
    layers: int | None = None
    pattern: Literal["uniform", "powerlaw"] = "powerlaw"
    reps: int = 5
    calls: int = 2
    energy_seconds: float = 2.0
    time_limit: float | None = None
    results: Path = RESULTS
    smoke: bool = False

    def __post_init__(self):
        if unknown := set(self.modes) - set(_MODES):
            raise ValueError(f"modes must be among {list(_MODES)}, got {sorted(unknown)}")


def smoke(args: Args) -> Args:
    """The tiny preset."""
    args = dataclasses.replace(args, results=smoke_results(args.results))
    small: dict[str, Any] = {"presets": ("tiny",), "modes": ("forward",), "layers": 1}
    small |= {"batch_size": 2, "seq_len": 32, "reps": 2, "calls": 1, "energy_seconds": 0.0}
    return with_smoke(args, **small)


def measure(args: Args, preset: str, mode: str) -> dict[str, Any]:
    """Rows of the variants, and the gain over the fastest dense one in percent."""
    model = first_layers(presets.get(preset), args.layers, preset)
    ffns = [model.layers[i].ffn for i in model.sparse_layers]
    profile = measured_profile([ffn.d_ff for ffn in ffns if ffn is not None])
    shape = benchmark.Shape(args.batch_size, args.seq_len, args.remat, pattern=args.pattern)
    case = benchmark.make_case(_MODES[mode], model, profile, shape)
    if jax.default_backend() != "gpu":
        case.sparse_engine = None
    rows = time_variants(case, reps=args.reps, calls=args.calls, energy_seconds=args.energy_seconds)
    by_name = {row["variant"]: row for row in rows}
    sparse = by_name["sparse_relu"]
    fastest = min(benchmark.DENSE, key=lambda name: by_name[name]["ms"])
    dense = by_name[fastest]
    return {
        "fastest_dense": fastest,
        "gain_percent": 100 * (dense["ms"] / sparse["ms"] - 1),
        # Ends of what single repetitions of both would have said.
        "gain_least": 100 * (dense["ms_min"] / sparse["ms_max"] - 1),
        "gain_most": 100 * (dense["ms_max"] / sparse["ms_min"] - 1),
        "nnz_asked": float(np.mean(profile)),
        "nnz_seen": float(np.mean(sparse["nnz_seen"])),
        "sparse_layers": sparse["sparse_layers"],
        "layers": model.num_layers,
        "rows": rows,
    }


def report(records: Records, args: Args) -> None:
    """The table and the picture, of everything recorded with these flags."""
    rows = records.all(**_common(args))
    table = []
    for r in rows:
        published = PUBLISHED[r["key"]["mode"]].get(r["key"]["preset"])
        line = {"preset": r["key"]["preset"], "mode": r["key"]["mode"]}
        line |= {"published_percent": published}
        line |= {k: v for k, v in r.items() if k not in ("key", "rows")}
        for row in r["rows"]:
            name = row["variant"]
            line |= {f"{name}_ms": row["ms"], f"{name}_tokens_per_s": row["tokens_per_s"]}
            line |= {f"{name}_peak_bytes": row["compiled_bytes"]["peak"]}
            line |= {f"{name}_joules_per_token": row["joules_per_token"]}
        table.append(line)
    write_csv(args.results / "study_size.csv", table)
    plots.plot_size(rows, PUBLISHED, args.results / "study_size.png")


def _common(args: Args) -> dict[str, Any]:
    names = ("batch_size", "seq_len", "remat", "pattern")
    return {name: getattr(args, name) for name in names} | {"cut_to": args.layers}


def main(args: Args) -> int:
    """Measures what is missing and returns the exit status."""
    args = smoke(args) if args.smoke else args
    not_empty(args, "presets", "modes")
    at_least(args, 1, "batch_size", "seq_len", "layers", "reps", "calls")
    at_least(args, 0, "energy_seconds", "time_limit")
    for preset in args.presets:
        first_layers(presets.get(preset), args.layers, preset)
    check_folder("--results", args.results)
    if not args.smoke:
        check_gpu("timing the sparse engine")
    budget, records = Budget(args.time_limit), Records(args.results / "study_size.jsonl")
    for preset in args.presets:
        for mode in args.modes:
            key = {"preset": preset, "mode": mode} | _common(args)
            if records.find(key) is not None:
                continue
            if budget.spent:
                print("time is up; the same command goes on", flush=True)
                if records.all(**_common(args)):
                    report(records, args)
                return 0
            found = records.add(key, measure(args, preset, mode))
            published = PUBLISHED[mode].get(preset)
            print(
                f"{preset:6} {mode:9} {found['gain_percent']:+.1f} % over {found['fastest_dense']} "
                f"({found['gain_least']:+.1f} to {found['gain_most']:+.1f}), published "
                f"{'none' if published is None else format(published, '+.1f')}; nnz "
                f"{found['nnz_seen']:.1f}, {found['sparse_layers']:g} of {found['layers']} layers "
                "sparse",
                flush=True,
            )
    report(records, args)
    return 0


if __name__ == "__main__":
    run_script(main, Args)
