"""Times training steps over splits of 1, 2, 4, ... devices, or plans them on paper.

    python experiments/bench_scaling.py --preset 2b --out rows.jsonl        # all GPUs of this host
    python experiments/bench_scaling.py --devices 1 2 --remat full --strong --batch-size 16
    python experiments/bench_scaling.py --plan --preset 2b --out plan.jsonl  # needs no device
    python experiments/bench_scaling.py --smoke                             # tiny, host devices

Weak scaling: --batch-size sequences per device; with --strong, of all devices together. Weights are
random and the same everywhere; gate biases set the activity that the sparse engine sees. Splits and
variants take turns in every repetition. `collective_share` is from a profiler's trace, a mean over
devices, and `collective_exposed_share` the part of it with nothing else running; as a check,
`outside_share` is 1 - (ms on one device) / ms, the share that one device with as much work does not
need (weak scaling without a tensor split; above the former where devices wait for the host).
A figure is written beside --out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

from pallas_kernels import UnsupportedError
from sparsejax import scaling_benchmark as lib
from sparsejax.analysis import scaling, scaling_plots
from sparsejax.analysis.devices import DEVICES
from sparsejax.config import ModelConfig
from sparsejax.studies.flags import (
    at_least,
    check_devices,
    check_file,
    check_gpu,
    first_layers,
    not_empty,
    with_smoke,
)
from sparsejax.training.config import TrainConfig

SMOKE = {"preset": "tiny", "layers": 1, "batch_size": 2, "seq_len": 32, "nnz": 8.0, "reps": 1}
SMOKE |= {"calls": 1}


@dataclasses.dataclass(frozen=True)
class Flags:
    """Times training steps over splits of devices.

    Attributes:
      preset: a sparse preset, or a .json file.
      devices: counts; those beyond what is there are left out.
      splits: data x fsdp x tensor, such as 2x4x1, in the place of the usual ones of each count.
      variants: which models: dense with SiLU, dense with ReLU, ReLU with the sparse engine.
      strong: --batch-size is that of all devices together.
      batch_size: sequences per device (per update).
      seq_len: tokens per sequence.
      nnz: active neurons per token and layer.
      layers: use only the first so many layers.
      remat: as in experiments/train.py.
      accumulate: microbatches per update.
      reps: repetitions, in each of which splits and variants take turns.
      calls: updates per repetition.
      seed: weights and tokens.
      plan: no run: modelled steps for --plan-devices.
      plan_devices: counts to plan for.
      plan_batch: sequences of an update, all devices together, for the plan's second half.
      device: a card of `sparsejax.analysis.devices`, for the plan.
      utilisation: share of the card's peak that one device reaches, for the plan.
      speedup: of the sparse engine on one device, for the plan.
      out: JSON lines, appended; the figure is a .png of that name.
      smoke: tiny shapes, and unless --splits are given 1x2x2 where there are four devices; without
        a GPU the kernels are interpreted.
    """

    preset: str = "2b"
    devices: tuple[int, ...] = (1, 2, 4, 8)
    splits: tuple[str, ...] = ()
    variants: tuple[Literal["dense_silu", "dense_relu", "sparse_relu"], ...] = (
        "dense_silu",
        "sparse_relu",
    )
    strong: bool = False
    batch_size: int = 8
    seq_len: int = 2048
    nnz: float = 30.0
    layers: int | None = None
    remat: Literal["none", "dots", "full"] = "none"
    accumulate: int = 1
    reps: int = 5
    calls: int = 3
    seed: int = 0
    plan: bool = False
    plan_devices: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    plan_batch: int = 512
    device: str = "h200"
    utilisation: float = 0.42
    speedup: float = 1.0
    out: Path | None = None
    smoke: bool = False


def splits_of(flags: Flags, model: ModelConfig) -> list[lib.Split]:
    """(1, 1, 1) and what is asked for, or what fits of the usual splits."""
    there = jax.device_count()
    texts = flags.splits or (("1x2x2",) if flags.smoke and there >= 4 else ())
    if texts:
        found = [_split(text) for text in texts]
    else:
        counts = [n for n in flags.devices if n <= there]
        found = [s for n in counts for s in lib.default_splits(n)]
        fit = {s for n in counts for s in scaling.splits(model, n, max_tensor=n)}
        for split in found:
            if split not in fit:
                print(f"left out, the model does not divide: {split}", flush=True)
        found = [split for split in found if split in fit]
    return list(dict.fromkeys([(1, 1, 1), *found]))


def _split(text: str) -> lib.Split:
    numbers = text.split("x")
    if len(numbers) != 3 or not all(n.isdigit() and int(n) for n in numbers):
        raise ValueError(f"--splits: expected data x fsdp x tensor such as 2x4x1, got {text!r}")
    data, fsdp, tensor = map(int, numbers)
    check_devices(f"--splits: {text}", data * fsdp * tensor)
    return data, fsdp, tensor


def bench(flags: Flags) -> list[dict[str, Any]]:
    """One row per split and variant."""
    not_empty(flags, "variants")
    at_least(flags, 1, "devices", "batch_size", "seq_len", "layers", "accumulate", "reps", "calls")
    at_least(flags, 0, "nnz", "seed")
    model = first_layers(TrainConfig(preset=flags.preset).model(), flags.layers, flags.preset)
    if not model.sparse_layers:
        raise ValueError(f"--preset {flags.preset!r} has no ReLU layer to be sparse in")
    if "sparse_relu" in flags.variants and not flags.smoke:
        check_gpu("the sparse engine")

    def shape(devices: int) -> lib.Shape:
        rows = flags.batch_size * (1 if flags.strong else devices)
        return lib.Shape(rows, flags.seq_len, flags.remat, flags.accumulate, flags.seed)

    splits = splits_of(flags, model)
    began = time.perf_counter()

    def done(what: str) -> None:
        print(f"{what}: {time.perf_counter() - began:.0f} s since the start", flush=True)

    biases = lib.find_biases(model, [flags.nnz] * len(model.sparse_layers), shape(1))
    done("activity set")
    cases = [lib.Case(model, biases, split, shape(math.prod(split))) for split in splits]
    interpret = flags.smoke and jax.default_backend() != "gpu"
    known = lib.compile_cases(cases, flags.variants, interpret)
    done("compiled")
    lib.warm_up(cases, known)
    done("first calls")
    times = lib.time_in_turns(cases, flags.variants, flags.reps, flags.calls)
    done("timed")
    for (split, variant), values in times.items():  # tracing takes a while more
        print(f"{split!s:12} {variant:12} {statistics.median(values):9.2f} ms", flush=True)
    shares = lib.collective_times(cases, known)
    done("traced")
    medians = {key: statistics.median(values) for key, values in times.items()}
    rows = []
    for case in cases:
        devices, tokens = case.mesh.size, case.shape.rows * case.shape.seq_len
        for variant in flags.variants:
            key = (case.split, variant)
            del known[key]["names"]
            one, ms = medians[(1, 1, 1), variant], medians[key]
            same_work = not flags.strong and case.split[2] == 1
            work = 1 if flags.strong else devices
            rows.append(
                {"bench": "scaling", "variant": variant, "split": case.split, "devices": devices}
                | {"ms": ms, "ms_min": min(times[key]), "ms_max": max(times[key])}
                | {"tokens_per_s": tokens / ms * 1e3, "efficiency": one * work / ms / devices}
                | {"gain": medians[case.split, flags.variants[0]] / ms}
                | {"outside_share": 1 - one / ms if same_work else None}
                | {"modelled_ms": modelled(flags, case, variant, one)}
                | shares[key]
                | known[key]
            )
    return rows


def modelled(flags: Flags, case: lib.Case, variant: str, one_ms: float) -> list[float] | None:
    """Bounds of the modelled step, from the rate that one device was measured to reach."""
    kind = jax.devices()[0].device_kind
    names = [name for name in DEVICES if name.upper() in kind]
    if not names:
        return None
    settings = {"remat": flags.remat, "accumulate": flags.accumulate}
    settings |= {"sparse": variant == "sparse_relu", "cluster": scaling.Cluster(names[0])}
    config, length = case.config(variant), flags.seq_len
    alone = scaling.estimate(
        config, (1, 1, 1), flags.batch_size, length, utilisation=1.0, **settings
    )
    reached = alone.compute / (one_ms / 1e3 - alone.optimiser)
    step = scaling.estimate(
        config, case.split, case.shape.rows, length, utilisation=reached, **settings
    )
    return [step.hidden * 1e3, step.exposed * 1e3]


def plan(flags: Flags) -> list[dict[str, Any]]:
    """The best modelled splits of every count, for a batch that grows and for one that does not."""
    at_least(flags, 1, "plan_devices", "plan_batch", "batch_size", "seq_len")
    config = TrainConfig(preset=flags.preset).model()
    counts, each, whole = flags.plan_devices, flags.batch_size, flags.plan_batch
    batches = {f"{each} sequences per device": [each * n for n in counts]}
    batches[f"{whole} sequences"] = [whole] * len(counts)
    rows = []
    for name, batch in batches.items():
        found = scaling.plan_rows(
            config,
            counts,
            batch,
            flags.seq_len,
            reference=each,
            cluster=scaling.Cluster(flags.device),
            utilisation=flags.utilisation,
            speedup=flags.speedup,
            remat=flags.remat,
            sparse=flags.speedup != 1,
        )
        rows += [{"bench": "scaling_plan", "batch": name} | row for row in found]
    return rows


def about(flags: Flags) -> dict[str, Any]:
    """What every row says of the run."""
    sha = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    device = flags.device if flags.plan else jax.devices()[0].device_kind
    said = json.loads(json.dumps(dataclasses.asdict(flags), default=str))
    left_out = {"devices", "device"} | (set() if flags.plan else {"utilisation"})
    said = {k: v for k, v in said.items() if k not in left_out}
    flags_of_xla = {"xla_flags": os.environ.get("XLA_FLAGS", "")}
    return {"device": device, "jax": jax.__version__, "git": sha} | flags_of_xla | said


def main(args: list[str] | None = None) -> None:
    """Parses flags, runs, prints a table, writes rows and a figure."""
    flags = tyro.cli(Flags, args=args)
    if flags.smoke:
        flags = with_smoke(flags, **SMOKE)
    figure = flags.out.with_suffix(".png") if flags.out else None
    if figure is not None and figure == flags.out:
        raise ValueError(f"--out {flags.out} is where the figure goes; name a .jsonl file")
    check_file("--out", flags.out)
    check_file("--out", figure)
    if flags.plan:
        rows = plan(flags)
        for row in rows:
            low, high = row["efficiency"]
            print(
                f"{row['batch']:26} {row['devices']:4}  {row['split']!s:14} "
                f"{row['hidden_ms']:8.1f} to {row['exposed_ms']:8.1f} ms  "
                f"efficiency {low:.2f} to {high:.2f}  {row['state_gb']:.1f} GB of state"
            )
        scaling_plots.plot_plan(rows, figure)
    else:
        rows = bench(flags)
        for row in rows:
            share, bare = row["collective_share"], row["collective_exposed_share"]
            told = row["trace_reason"] or f"collectives {share:.3f} (exposed {bare:.3f})"
            print(
                f"{row['split']!s:12} {row['variant']:12} {row['ms']:9.2f} ms  "
                f"{row['tokens_per_s']:11,.0f} tokens/s  efficiency {row['efficiency']:.3f}  "
                f"{row['compiled_bytes']['peak'] / 1e9:.2f} GB  {told}"
            )
        scaling_plots.plot_scaling(rows, figure)
    if flags.out:
        with flags.out.open("a") as file:
            file.writelines(json.dumps(about(flags) | row) + "\n" for row in rows)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, UnsupportedError) as error:
        raise SystemExit(f"bench_scaling.py: {error}") from None
