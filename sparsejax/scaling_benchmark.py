"""Training steps of one model under several splits of devices, for experiments/bench_scaling.py.

A case is one mesh. The states of several cases do not fit into memory together, so a case makes its
own when its turn comes and drops it afterwards: parameters do not depend on the mesh, and gate
biases, which set the activity of the sparse engine, are found once, on one device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pallas_kernels
from sparsejax.analysis import trace
from sparsejax.analysis.collectives import collectives, totals
from sparsejax.benchmark import silu
from sparsejax.calibrate import (
    calibrate_gate_bias,
    damp_outputs,
    restore_gate_bias,
    with_gate_bias,
    without_gate_bias,
)
from sparsejax.config import ModelConfig
from sparsejax.hardware import memory_needed
from sparsejax.model import Options
from sparsejax.params import init_params
from sparsejax.sharding import MeshConfig, batch_sharding, check_batch, make_mesh
from sparsejax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from sparsejax.training.state import TrainState, state_template
from sparsejax.training.step import LossConfig, make_train_step

# Adam moves every parameter by up to the learning rate: here by nothing that a float32 keeps.
_STILL = OptimizerConfig(learning_rate=1e-12, schedule="constant", warmup_steps=0)
_STEPS = 1000

Split = tuple[int, int, int]
Key = tuple[Split, str]  # and variant
Known = dict[Key, dict[str, Any]]
Biases = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is run.

    Attributes:
      rows: sequences of one update, all devices together.
      seq_len: tokens per sequence.
      remat: see `Options`.
      accumulate: microbatches per update.
      seed: of weights and tokens.
    """

    rows: int
    seq_len: int
    remat: str = "none"
    accumulate: int = 1
    seed: int = 0


def tokens_of(model: ModelConfig, shape: Shape, batch: int = 0) -> np.ndarray:
    """Ids (rows, seq_len + 1) of batch 0 or 1; fewer rows are the first of more."""
    rng = np.random.default_rng([shape.seed, batch])
    return rng.integers(0, model.vocab_size, (shape.rows, shape.seq_len + 1), np.int32)


def find_biases(model: ModelConfig, nnz: Sequence[float], shape: Shape) -> Biases:
    """Gate biases by layer that give `nnz` active neurons on both batches, on one device."""
    model, mesh = with_gate_bias(model), make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    with jax.set_mesh(mesh):
        params = damp_outputs(init_params(model, jax.random.key(shape.seed)))
        tokens = np.concatenate([tokens_of(model, shape, batch)[:, :-1] for batch in (0, 1)])
        params = calibrate_gate_bias(model, params, tokens, nnz, seed=shape.seed)
    return {
        f"layer_{i}": np.asarray(params[f"layer_{i}"]["ffn"]["gate_bias"])
        for i in model.sparse_layers
    }


class Case:
    """One split of the first devices.

    Attributes:
      split: (data, fsdp, tensor).
      mesh: the devices.
      compiled: variant -> executable, set by the caller before `start`.
    """

    def __init__(self, model: ModelConfig, biases: Biases, split: Split, shape: Shape):
        self.split, self.shape, self.model = split, shape, with_gate_bias(model)
        self.mesh = make_mesh(MeshConfig(*split), jax.devices()[: math.prod(split)])
        check_batch(self.mesh, shape.rows, shape.accumulate)
        self.compiled: dict[str, Any] = {}
        self.optimizer = make_optimizer(_STILL, _STEPS)
        self.schedule = make_schedule(_STILL, _STEPS)
        template = state_template(self.model, self.optimizer, self.mesh)
        self._shardings: TrainState = jax.tree.map(lambda leaf: leaf.sharding, template)
        self._damp = jax.jit(damp_outputs, donate_argnums=0, out_shardings=self._shardings.params)
        placed = self._shardings.opt_state
        self._init_optimizer = jax.jit(self.optimizer.init, out_shardings=placed)
        self._biases, self.state, self.batches = biases, None, []
        self._last: dict[str, Any] = {}

    def _fresh_state(self) -> TrainState:
        where = self._shardings
        params = init_params(self.model, jax.random.key(self.shape.seed), where.params)
        params = self._damp(params)
        for name, bias in self._biases.items():
            bias = jax.device_put(bias, where.params[name]["ffn"]["gate_bias"])
            params[name] = params[name] | {"ffn": params[name]["ffn"] | {"gate_bias": bias}}
        step = jax.device_put(np.zeros((), np.int32), where.step)
        return TrainState(step, params, self._init_optimizer(params))

    def config(self, variant: str) -> ModelConfig:
        """The model of a variant; SiLU has no gate bias, as dense models have none."""
        return silu(self.model) if variant == "dense_silu" else self.model

    def lower(self, variant: str) -> Any:
        """The update of experiments/train.py, traced."""
        config = self.config(variant)
        engine = "triton" if variant == "sparse_relu" else "xla"
        step = make_train_step(
            config,
            self.optimizer,
            self.schedule,
            LossConfig(
                l1_coeff=0.0 if variant == "dense_silu" else 2e-5,
                accumulate=self.shape.accumulate,
            ),
            Options(implementation=engine, remat=self.shape.remat),
            self.mesh,
        )
        shape = (self.shape.rows, self.shape.seq_len)
        ids = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(self.mesh))
        template = state_template(config, self.optimizer, self.mesh)
        return step.lower(template, {"tokens": ids, "targets": ids})

    def start(self) -> None:
        """Makes state and batches."""
        with jax.set_mesh(self.mesh):
            self.state = self._fresh_state()
        where = batch_sharding(self.mesh)
        for i in range(2):
            ids = tokens_of(self.model, self.shape, i)
            batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
            self.batches.append(jax.device_put(batch, where))
        jax.block_until_ready((self.state, self.batches))

    def call(self, variant: str, i: int) -> Any:
        """Starts update i; returns an array to wait for."""
        # The old state's buffers are donated; biases that a variant does not have stay outside.
        bare = variant == "dense_silu"
        state = without_gate_bias(self.state) if bare else self.state
        new, metrics = self.compiled[variant](state, self.batches[i % 2])
        self.state = restore_gate_bias(new, self.state) if bare else new
        kept = {k: metrics[k] for k in ("loss", "nnz_per_layer", "sparse_layers")}
        self._last.setdefault(variant, {})[i % 2] = kept
        return metrics["loss"]

    def seen(self, variant: str) -> dict[str, Any]:
        """Loss, nnz by layer and layers that ran sparse: means of the batches' last calls."""
        found = jax.device_get(list(self._last[variant].values()))
        mean = jax.tree.map(lambda *x: np.mean(np.asarray(x, np.float64), axis=0), *found)
        return {
            "loss": float(mean["loss"]),
            "nnz_seen": mean["nnz_per_layer"].tolist(),
            "sparse_layers": float(mean["sparse_layers"]),
        }

    def stop(self) -> None:
        """Drops state and batches."""
        self.state, self.batches = None, []


def default_splits(devices: int) -> list[Split]:
    """Each axis alone, and the products: two axes as even as they can be, and all three."""
    n = devices
    small = 2 ** (n.bit_length() // 2)  # the larger half of an uneven power of two
    found = [(n, 1, 1), (1, n, 1), (1, 1, n)]
    if n >= 4:
        found += [(n // small, small, 1), (n // 2, 1, 2), (1, n // 2, 2)]
    if n >= 8:
        found.append((n // 4, 2, 2))
    return list(dict.fromkeys(found))


def compile_cases(cases: Sequence[Case], variants: Sequence[str], interpret: bool) -> Known:
    """Compiles every variant of every case; what is known of the programs before they run.

    Returns:
      By (split, variant): seconds, bytes on each device, collectives by kind and axes, the bytes
      that each device sends, and the names of its collective instructions.
    """
    lowered = {}
    for case in cases:
        for variant in variants:
            kernels = pallas_kernels.interpret() if interpret else contextlib.nullcontext()
            with kernels, jax.set_mesh(case.mesh):
                lowered[case, variant] = case.lower(variant)

    def build(program: Any) -> tuple[Any, float]:
        began = time.perf_counter()
        return program.compile(), time.perf_counter() - began

    known: Known = {}
    with ThreadPoolExecutor(min(len(lowered), os.cpu_count() or 1)) as pool:
        built = zip(lowered, pool.map(build, lowered.values()), strict=True)
        for (case, variant), (program, seconds) in built:
            case.compiled[variant] = program
            parts = memory_needed(program)
            found = collectives(program.as_text())
            known[case.split, variant] = {
                "compile_s": seconds,
                "compiled_bytes": parts,
                "collectives": totals(found, case.mesh),
                "sent_bytes": sum(c.sent for c in found),
                "names": {c.name for c in found},
            }
            print(f"compiled {case.split} {variant}: {parts['peak'] / 1e9:.2f} GB", flush=True)
    return known


def warm_up(cases: Sequence[Case], known: Known) -> None:
    """First calls, smaller programs first: where the allocator's peak rises it is a program's own.

    Adds to `known`: peak of the fullest device, loss and activity.
    """

    def peak_of(key: Key) -> int:
        return known[key]["compiled_bytes"]["peak"]

    before = 0
    keys = {case: sorted((k for k in known if k[0] == case.split), key=peak_of) for case in cases}
    for case in sorted(cases, key=lambda case: peak_of(keys[case][0])):
        case.start()
        for split, variant in keys[case]:
            jax.block_until_ready([case.call(variant, i) for i in range(2)])
            known[split, variant] |= case.seen(variant)
            stats = [device.memory_stats() or {} for device in case.mesh.devices.flat]
            peak = max((s.get("peak_bytes_in_use", 0) for s in stats), default=0) or None
            known[split, variant]["allocator_peak_bytes"] = peak
            known[split, variant]["allocator_peak_is_own"] = None if peak is None else peak > before
            before = max(before, peak or 0)
        case.stop()


def time_in_turns(
    cases: Sequence[Case], variants: Sequence[str], reps: int, calls: int
) -> dict[Key, list[float]]:
    """Milliseconds per update of every repetition; whoever begins changes."""
    times: dict[Key, list[float]] = {}
    for rep in range(reps):
        for case in _rotated(cases, rep):
            case.start()
            for variant in _rotated(variants, rep):
                jax.block_until_ready(case.call(variant, 0))
                began = time.perf_counter()
                jax.block_until_ready([case.call(variant, i) for i in range(calls)])
                ms = (time.perf_counter() - began) / calls * 1e3
                times.setdefault((case.split, variant), []).append(ms)
            case.stop()
    return times


def _rotated(items: Sequence[Any], by: int) -> list[Any]:
    shift = by % len(items)
    return [*items[shift:], *items[:shift]]


def collective_times(cases: Sequence[Case], known: Known) -> dict[Key, dict[str, Any]]:
    """Shares of time in collectives of two updates under the profiler, means over devices.

    Args:
      cases: compiled.
      known: from `compile_cases`.

    Returns:
      By (split, variant): collective_share, the part of it with nothing else running as
      collective_exposed_share, and idle_share; where the profiler saw no device (its library may be
      absent) None, and why as trace_reason.
    """
    found = {}
    for case in cases:
        case.start()
        for key in (k for k in known if k[0] == case.split):
            found[key] = _collective_time(case, key[1], known[key]["names"])
        case.stop()
    return found


def _collective_time(case: Case, variant: str, names: Collection[str]) -> dict[str, Any]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python functions would slow the host
    with tempfile.TemporaryDirectory() as folder:
        jax.block_until_ready(case.call(variant, 0))
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready([case.call(variant, i) for i in range(2)])
        try:
            times = trace.device_times(trace.read_trace(Path(folder)), names).values()
        except (ValueError, FileNotFoundError) as error:  # the step times are worth keeping
            shares = ("collective_share", "collective_exposed_share", "idle_share")
            return dict.fromkeys(shares, None) | {"trace_reason": str(error)}
    return {
        "collective_share": statistics.mean(t.collectives / t.span for t in times),
        "collective_exposed_share": statistics.mean(t.exposed / t.span for t in times),
        "idle_share": statistics.mean(t.idle / t.span for t in times),
        "trace_reason": None,
    }
