"""Sparsity against speed: trained checkpoints, dense and sparse, on real text.

    python experiments/study_speed.py --data corpora/mine
    python experiments/study_speed.py --smoke --results runs/smoke      # tiny, on a CPU

The runs are those of experiments/study_sparsity.py: one that is not under --runs is trained first.
Each checkpoint goes through prefill, a training step and decoding as dense SiLU, dense ReLU and
sparse ReLU, in turns in one process, on held-out text: as it is, and without the neurons that are
dead on the training text. Prefill and training have a fourth variant, `picked`: sparse ReLU with an
engine per layer, picked from the activity on the training text. Measurements are lines of
study_speed.jsonl under --results, and what has one is not measured again. On one H200 it should
take some ten minutes with the default two checkpoints, and two more where they are to be trained;
--time-limit splits it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from sparsejax import benchmark, surgery
from sparsejax.analysis import ActivationStats, activation_stats, pick_engines
from sparsejax.analysis.engines import LEAST_TOKENS
from sparsejax.config import ModelConfig
from sparsejax.data import open_source
from sparsejax.studies import plots
from sparsejax.studies.flags import (
    RESULTS,
    at_least,
    check_folder,
    check_gpu,
    check_setting,
    not_empty,
    smoke_results,
    with_smoke,
)
from sparsejax.studies.quality import engine_errors, held_out, windows
from sparsejax.studies.records import Budget, Records, write_csv
from sparsejax.studies.sweep import RunSpec, Setting, compile_cache, train_run
from sparsejax.studies.trained import Mode, time_trained
from sparsejax.training.launch import run_script
from sparsejax.training.load import load_model
from sparsejax.types import Params

Prepared = tuple[ModelConfig, Params, ActivationStats]
SMOKE = Setting(layers=1, d_model=32, batch_size=8, seq_len=32, steps=4, evaluations=2)


@dataclasses.dataclass(frozen=True)
class Args:
    """Times trained checkpoints in all modes.

    Attributes:
      setting: model, data and length of the runs.
      l1: coefficients of the checkpoints.
      modes: prefill, train, decode.
      rows: sequences of a prefill or a training step, of `seq_len` tokens.
      decode_rows: rows decoded together, one case each.
      decode_steps: tokens per row and call of decode, behind a prompt that fills the context.
      multiple: what widths without dead neurons are rounded up to.
      reps: repetitions, in each of which the variants take turns.
      calls: calls per repetition.
      energy_seconds: how long each variant runs for its energy.
      time_limit: seconds after which no case begins.
      results: where records, the table and the picture go.
      smoke: a tiny model.
    """

    setting: Annotated[Setting, tyro.conf.arg(name="")] = Setting()
    l1: tuple[float, ...] = (1e-3, 3e-3)
    modes: tuple[Mode, ...] = ("prefill", "train", "decode")
    rows: int = 32
    decode_rows: tuple[int, ...] = (1, 32)
    decode_steps: int = 32
    multiple: int = 128
    reps: int = 5
    calls: int = 2
    energy_seconds: float = 2.0
    time_limit: float | None = None
    results: Path = RESULTS
    smoke: bool = False


def smoke(args: Args) -> Args:
    """One checkpoint, one row of decoding (which fills its cache by a prefill)."""
    args = dataclasses.replace(args, results=smoke_results(args.results))
    setting = dataclasses.replace(SMOKE, runs=args.results / "runs", data=args.setting.data)
    small: dict[str, Any] = {"rows": 4, "decode_rows": (1,), "decode_steps": 3, "multiple": 1}
    small |= {
        "modes": ("train", "decode"),
        "l1": (1e-2,),
        "reps": 2,
        "calls": 1,
        "energy_seconds": 0.0,
    }
    return with_smoke(args, setting=setting, **small)


def cases(args: Args) -> list[tuple[Mode, benchmark.Shape]]:
    """(mode, shape) of everything that is timed."""
    length = args.setting.seq_len
    found: list[tuple[Mode, benchmark.Shape]] = []
    for mode in args.modes:
        for rows in args.decode_rows if mode == "decode" else (args.rows,):
            prompt = length - args.decode_steps if mode == "decode" else length
            shape = benchmark.Shape(rows, prompt, decode_steps=args.decode_steps)
            found.append((mode, shape))
    return found


def prepare(args: Args, spec: RunSpec) -> dict[bool, Prepared]:
    """The checkpoint as it is (False) and without neurons dead on training text (True).

    With the activity on that text.
    """
    setting = args.setting
    # Not around the timed programs: one that was read from a cache may not tell its memory.
    with compile_cache(setting.runs / "compiled"):
        folder = train_run(setting, spec)
    model = load_model(folder)
    text = windows(open_source(setting.data), setting.seq_len, setting.batch_size, batches=8)
    stats = activation_stats(model.config, model.params, text)
    config, params, report = surgery.drop_dead_neurons(
        model.config, model.params, stats, multiple=args.multiple
    )
    print(f"{spec.name}: {report.work_removed:.1%} of the gate projection is dead", flush=True)
    return {
        False: (model.config, model.params, stats),
        True: (config, params, of_kept(stats, report)),
    }


def of_kept(stats: ActivationStats, report: surgery.PruneReport) -> ActivationStats:
    """The statistics of what is left when neurons go that never fired."""
    layers = []
    for part in report.layers:
        found = stats.of_layer(part.layer)
        assert part.kept is not None
        histogram, fired = found.histogram[: part.after + 1], found.fired[list(part.kept)]
        layers.append(dataclasses.replace(found, histogram=histogram, fired=fired))
    return ActivationStats(tuple(layers), stats.tokens)


def engines_of(
    config: ModelConfig, stats: ActivationStats, mode: Mode, shape: benchmark.Shape
) -> tuple[str | None, ...] | None:
    """An engine per layer; None for decoding, which has no cost model."""
    tokens = shape.batch_size * shape.seq_len
    if mode == "decode" or tokens < LEAST_TOKENS:
        return None
    return pick_engines(config, stats, tokens=tokens, training=mode == "train")


def quality_of(args: Args, config: ModelConfig, params: Params) -> dict[str, Any]:
    """Held-out loss and the engines' errors."""
    setting = args.setting
    held = windows(open_source(setting.data, "val"), setting.seq_len, setting.batch_size)
    sparse = "triton" if jax.default_backend() == "gpu" else None
    errors = engine_errors(config, params, held[0]["tokens"][:8], sparse)
    return {"ce": held_out(config, params, held[: 4 if args.smoke else None])} | errors


def key_of(
    args: Args, l1: float, pruned: bool, mode: str, shape: benchmark.Shape
) -> dict[str, Any]:
    """Of one case."""
    own: dict[str, Any] = {"l1": l1, "pruned": pruned, "multiple": args.multiple, "mode": mode}
    own |= {"sequences": shape.batch_size, "prompt": shape.seq_len}
    return args.setting.key() | own | {"decode_steps": shape.decode_steps}


def report(records: Records, args: Args) -> None:
    """The table and the picture."""
    rows = [
        {"checkpoint": f"L1 {r['key']['l1']:g}", **r["key"], **r, **row}
        for r in records.all(
            **args.setting.key(), multiple=args.multiple, decode_steps=args.decode_steps
        )
        for row in r["rows"]
    ]
    hidden = ("rows", "key", "corpus", "compiled_bytes")
    write_csv(
        args.results / "study_speed.csv",
        [{k: v for k, v in row.items() if k not in hidden} for row in rows],
    )
    plots.plot_speed(rows, args.results / "study_speed.png")


def main(args: Args) -> int:
    """Measures what is missing and returns the exit status."""
    args = smoke(args) if args.smoke else args
    check_setting(args.setting)
    not_empty(args, "modes")
    at_least(args, 1, "rows", "decode_rows", "decode_steps", "multiple", "reps", "calls")
    at_least(args, 0, "l1", "energy_seconds", "time_limit")
    if "decode" in args.modes and args.setting.seq_len <= args.decode_steps:
        raise ValueError(
            f"--decode-steps {args.decode_steps} leave no room for a prompt in --seq-len "
            f"{args.setting.seq_len}: they must be fewer"
        )
    check_folder("--results", args.results)
    if not args.smoke:
        check_gpu("timing the sparse engine")
    budget, records = Budget(args.time_limit), Records(args.results / "study_speed.jsonl")
    held = open_source(args.setting.data, "val")
    measuring = {name: getattr(args, name) for name in ("reps", "calls", "energy_seconds")}
    for coeff in args.l1:
        spec = RunSpec("relu", coeff)
        todo: list[tuple[bool, Mode, benchmark.Shape, dict[str, Any]]] = [
            (pruned, mode, shape, key_of(args, coeff, pruned, mode, shape))
            for pruned in (False, True)
            for mode, shape in cases(args)
        ]
        todo = [entry for entry in todo if records.find(entry[-1]) is None]
        if not todo or budget.spent:
            continue
        models = prepare(args, spec)
        quality = {pruned: quality_of(args, *found[:2]) for pruned, found in models.items()}
        for pruned, mode, shape, key in todo:
            if budget.spent:
                print("time is up; the same command goes on", flush=True)
                break
            config, params, stats = models[pruned]
            engines = engines_of(config, stats, mode, shape)
            rows = time_trained(mode, config, params, held, shape, engines=engines, **measuring)
            widths = [layer.ffn.d_ff for layer in config.layers if layer.ffn]
            records.add(key, quality[pruned] | {"d_ff": widths, "rows": rows})
            name = f"{spec.name}{' pruned' if pruned else ''}, {mode} x {shape.batch_size}"
            for row in rows:
                print(
                    f"{name:36} {row['variant']:12} {row['ms']:9.3f} ms  "
                    f"{row['tokens_per_s']:11,.0f} tokens/s  "
                    f"x{row['ratio_to_fastest_dense']:.3f}  nnz {np.mean(row['nnz_seen']):.1f}"
                    f"  {row['sparse_layers']:.1f} layers sparse",
                    flush=True,
                )
            report(records, args)
    return 0


if __name__ == "__main__":
    run_script(main, Args)
