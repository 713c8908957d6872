"""Timing in one process: variants of one model in turns, and many models in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from sparsejax import benchmark
from sparsejax.attention import init_cache
from sparsejax.config import ModelConfig
from sparsejax.decoding import compute_params
from sparsejax.energy import PowerMeter
from sparsejax.hardware import memory_needed
from sparsejax.modules import Options
from sparsejax.types import Params

SETTLE = 0.5  # seconds of work before energy counts


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to time, with the engine of its feed-forward layers."""

    config: ModelConfig
    params: Params
    options: Options = Options()


@dataclasses.dataclass(frozen=True)
class Times:
    """Milliseconds per call (decode: per step): median of the repetitions, least, most."""

    ms: float
    least: float
    most: float


def time_variants(
    case: benchmark.Case,
    *,
    reps: int,
    calls: int,
    energy_seconds: float = 0.0,
    interpret: bool = False,
) -> list[dict[str, Any]]:
    """One row per variant of `case`: time, ratios, memory, energy, activity.

    Programs are compiled side by side, and variants take turns in every repetition.

    Args:
      case: what is run, with parameters and activity set.
      reps: repetitions.
      calls: calls per repetition, whose mean counts.
      energy_seconds: how long each variant runs alone for its energy; 0 measures none.
      interpret: run kernels in interpret mode (no GPU).
    """
    programs = _compile_case(case, interpret)
    case.compiled = {name: executable for name, (executable, _) in programs.items()}
    print("compiled:", {name: round(s, 1) for name, (_, s) in programs.items()}, flush=True)
    sizes = {name: memory_needed(case.compiled[name]) for name in case.variants}
    with PowerMeter() as meter:
        case.prepare()
        peaks = _warm_up(case, sizes)

        def run(name: str) -> None:
            jax.block_until_ready([case.call(name, i) for i in range(calls)])

        times = in_turns(
            {n: functools.partial(run, n) for n in case.variants}, reps, calls, warm=False
        )
        energies = {n: _energy(case, meter, n, energy_seconds) for n in case.variants}
    rows = []
    for name, found in times.items():
        nnz, sparse = case.seen(name)
        rows.append(
            {"variant": name, "ms": found.ms, "ms_min": found.least, "ms_max": found.most}
            | {"tokens_per_s": case.tokens_per_call / found.ms * 1e3}
            | {f"ratio_to_{d}": times[d].ms / found.ms for d in benchmark.DENSE}
            | {"compiled_bytes": sizes[name]}
            | peaks[name]
            | energies[name]
            | {"compile_s": programs[name][1], "sparse_layers": sum(sparse), "nnz_seen": nnz}
            | {"sparse_per_layer": sparse if len(sparse) == len(nnz) else None}
        )
    return rows


def time_models(
    models: Mapping[str, Model],
    *,
    seq_len: int,
    batch: int = 1,
    steps: int = 32,
    reps: int = 5,
    calls: int = 2,
) -> dict[str, dict[str, Times]]:
    """{"decode": {name: Times}, "prefill": {name: Times}} of models that share a vocabulary.

    Programs are compiled side by side, one for all models of one config, and run in turns. Ids are
    drawn at random.

    Args:
      models: name -> model; parameters are cast to compute dtype.
      seq_len: tokens of a prompt.
      batch: prompts that "prefill" reads at once; "decode" is of one row behind such a prompt, and
        its time that of one step.
      steps: decode steps per call.
      reps: repetitions.
      calls: calls per repetition, whose mean counts.
    """
    vocab = min(model.config.vocab_size for model in models.values())
    drawn = np.random.default_rng(0).integers(0, vocab, (batch, seq_len + steps), np.int32)
    ids = jnp.asarray(drawn)
    prompts, fed = ids[:, :seq_len], ids[:1, seq_len:]
    cast = {name: compute_params(model.config, model.params) for name, model in models.items()}
    waiting: dict[Any, list[Any]] = {}
    with ThreadPoolExecutor() as pool:
        for name, model in models.items():
            kind = model.config, model.options
            if kind not in waiting:  # other weights, the same programs
                lowered = _lower(model, cast[name], prompts, fed)
                waiting[kind] = [pool.submit(program.compile) for program in lowered]
    programs = {kind: [future.result() for future in found] for kind, found in waiting.items()}
    decodes, prefills = {}, {}
    for name, model in models.items():
        decode, prefill, *others = programs[model.config, model.options]
        fill = others[0] if others else prefill
        prefills[name] = functools.partial(_prefill, prefill, cast[name], prompts, calls)
        cache = fill(cast[name], prompts[:1])[1]
        decodes[name] = functools.partial(_decode, decode, cast[name], [cache], fed, calls)
    return {
        "decode": in_turns(decodes, reps, calls * steps),
        "prefill": in_turns(prefills, reps, calls),
    }


def _lower(model: Model, params: Params, prompts: jax.Array, fed: jax.Array) -> list[Any]:
    """Decode steps, prefill of all prompts, and of the first alone where there are more."""
    config, options, seq_len = model.config, model.options, prompts.shape[1]
    slots = seq_len + fed.shape[1]
    fresh = dataclasses.replace(options, fresh_cache=True)
    prefill = jax.jit(functools.partial(benchmark.prefill_program, config, fresh, slots))
    decode = functools.partial(benchmark.decode_program, config, options, seq_len)
    cache = jax.eval_shape(functools.partial(init_cache, config, 1, slots))
    found = [jax.jit(decode, donate_argnums=1).lower(params, cache, fed)]
    inputs = [prompts, prompts[:1]][: min(len(prompts), 2)]
    return found + [prefill.lower(params, x) for x in inputs]


def _prefill(program: Any, params: Params, prompts: jax.Array, calls: int) -> None:
    jax.block_until_ready([program(params, prompts)[0] for _ in range(calls)])


def _decode(program: Any, params: Params, held: list[Any], fed: jax.Array, calls: int) -> None:
    """`calls` calls, each behind the prompt again; `held` keeps the cache, which is donated."""
    made = []
    for _ in range(calls):
        ids, held[0], *_ = program(params, held[0], fed)
        made.append(ids)
    jax.block_until_ready(made)  # the cache may be ready before, or hold nothing


def add_times(rows: list[dict[str, Any]], models: Mapping[str, Model], **setting: Any) -> None:
    """Adds decode_ms and prefill_ms, with their _least and _most, to rows by their "name".

    Args:
      rows: those that name one of the models are changed.
      models: name -> model.
      setting: of `time_models`.
    """
    for mode, found in time_models(models, **setting).items():
        for row in rows:
            if times := found.get(row["name"]):
                row |= {f"{mode}_ms": times.ms, f"{mode}_least": times.least}
                row |= {f"{mode}_most": times.most}


def in_turns(
    runs: Mapping[str, Callable[[], None]], reps: int, units: int, *, warm: bool = True
) -> dict[str, Times]:
    """Milliseconds per unit of each function, over repetitions; whoever begins changes.

    Args:
      runs: name -> a function that returns when its work is done.
      reps: repetitions.
      units: what the time of one call is divided by.
      warm: call each once before, untimed.
    """
    names, times = list(runs), {name: [] for name in runs}
    for name in names if warm else ():
        runs[name]()
    for rep in range(reps):
        shift = rep % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            runs[name]()
            times[name].append((time.perf_counter() - began) / units * 1e3)
    return {n: Times(statistics.median(ts), min(ts), max(ts)) for n, ts in times.items()}


def _compile_case(case: benchmark.Case, interpret: bool) -> dict[str, tuple[Any, float]]:
    """name -> (executable, seconds); traced one after the other, compiled in parallel."""
    context = pallas_kernels.interpret() if interpret else contextlib.nullcontext()

    def build(lowered: Any) -> tuple[Any, float]:
        began = time.perf_counter()
        return lowered.compile(), time.perf_counter() - began

    with ThreadPoolExecutor() as pool, context, jax.set_mesh(case.mesh):
        futures = {name: pool.submit(build, case.lower(name)) for name in case.programs}
        return {name: future.result() for name, future in futures.items()}


def _warm_up(case: benchmark.Case, sizes: dict[str, dict[str, int]]) -> dict[str, Any]:
    """First calls, the smallest program first: where the allocator's peak rises it is its own."""
    device = jax.local_devices()[0]
    peaks, before = {}, (device.memory_stats() or {}).get("peak_bytes_in_use") or 0
    for name in sorted(case.variants, key=lambda name: sizes[name]["peak"]):
        jax.block_until_ready(case.call(name, 0))
        stats = device.memory_stats() or {}
        peak = stats.get("peak_bytes_in_use")
        peaks[name] = {
            "allocator_peak_bytes": peak,
            "allocator_peak_is_own": None if peak is None else peak > before,
        }
        before = peak or 0
    return peaks


def _energy(case: benchmark.Case, meter: PowerMeter, name: str, seconds: float) -> dict[str, Any]:
    """Joules per token and mean watts while one variant runs alone."""
    if meter.reason or seconds <= 0:
        reason = meter.reason or "--energy-seconds is 0"
        return {"joules_per_token": None, "watts": None, "energy_reason": reason}
    began, calls, first = time.perf_counter(), 0, None
    while time.perf_counter() - began < SETTLE + seconds:
        jax.block_until_ready(case.call(name, calls))
        if first is None and time.perf_counter() - began > SETTLE:
            first, calls = time.perf_counter(), 0
        else:
            calls += 1
    end = time.perf_counter()
    joules = meter.joules(first or began, end)
    assert joules is not None
    tokens = max(calls, 1) * case.tokens_per_call
    return {"joules_per_token": joules / tokens, "watts": joules / (end - (first or began))}
