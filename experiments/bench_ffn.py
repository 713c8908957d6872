"""Times `gated_ffn` against the fastest dense XLA form, with a chosen number of active neurons.

    python experiments/bench_ffn.py --nnz 15 30 60 --pattern uniform --out rows.jsonl --plot f.png
    python experiments/bench_ffn.py --mode train --nnz 15 30 60 --pattern powerlaw
    python experiments/bench_ffn.py --tokens 1 8 32 --nnz 30          # decode
    python experiments/bench_ffn.py --pattern real --masks FILE.npz   # stored activation patterns
    python experiments/bench_ffn.py --pattern real --masks FILE.npz --mode train --d-model 1024
    python experiments/bench_ffn.py --smoke                           # tiny shapes, runs on a CPU

Up to 64 tokens, forward: 4 passes through --layers in one program, each call waiting for the last.
Engine and dense forms take turns inside every repetition, so that clocks and caches treat them
alike; a row's `ms` is the median, per layer. Errors are against float32, and for `--mode train` on
all tokens: y, l1, dx, dgate, dup, ddown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from pallas_kernels import UnsupportedError, gated_ffn, interpret, tuning
from sparsejax import ffn_benchmark as bench
from sparsejax.studies import records
from sparsejax.studies.flags import PICTURES, at_least, check_file, check_gpu, with_smoke

SMOKE: dict[str, Any] = {"tokens": (96, 2), "d_model": 64, "d_ff": 128, "nnz": (4.0, 16.0)}
SMOKE |= {"layers": 2, "repeats": 2, "calls": 1}
GRADIENTS = ("y", "l1", "dx", "dgate", "dup", "ddown")


@dataclasses.dataclass(frozen=True)
class Flags:
    """Times one feed-forward layer.

    Attributes:
      mode: forward, or forward and backward.
      tokens: numbers of tokens M.
      d_model: D.
      d_ff: F.
      nnz: active neurons per token.
      pattern: whether neurons fire equally often, by a power law, or as in --masks.
      masks: npz with `bits` (layers, ..., F / 8), for --pattern real (D should match the model's).
      implementation: the engine to time.
      dtype: bfloat16 or float32.
      layers: weights in turn in one program, forward up to 64 tokens and for --pattern real.
      repeats: repetitions, in each of which all forms take turns.
      calls: calls per repetition.
      out: JSON lines, appended.
      plot: time against nnz with the break-even marked.
      smoke: tiny shapes; without a GPU kernels are interpreted.
    """

    mode: Literal["forward", "train"] = "forward"
    tokens: tuple[int, ...] = (16384,)
    d_model: int = 2048
    d_ff: int = 5632
    nnz: tuple[float, ...] = (15, 30, 60, 120)
    pattern: Literal["uniform", "powerlaw", "real"] = "uniform"
    masks: Path = Path("../shared/data/activations/d1024_l12_f2816.npz")
    implementation: Literal["triton", "xla"] = "triton"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    layers: int = 8
    repeats: int = 9
    calls: int = 10
    out: Path | None = None
    plot: Path | None = None
    smoke: bool = False


def summary(times: dict[str, list[float]], seconds: dict[str, float], layers: int) -> list[dict]:
    """One row per timed form, each with the fastest dense form's median and the ratio."""
    median = {name: statistics.median(values) / layers for name, values in times.items()}
    dense = min(ms for name, ms in median.items() if name.startswith("dense"))
    return [
        {"implementation": name, "ms": median[name], "ms_min": values[0] / layers}
        | {"ms_max": values[-1] / layers, "dense_ms": dense, "ratio": dense / median[name]}
        | {"compile_s": seconds[name]}
        for name, values in times.items()
    ]


def bench_op(flags: Flags, tokens: int) -> Iterator[tuple[float, list[dict]]]:
    """(nnz, rows) of one shape, for every activity; decode runs several layers per call."""
    dtype = jnp.dtype(flags.dtype)
    decode = flags.mode == "forward" and tokens <= 64
    layers = flags.layers if decode else 1
    keys = jax.random.split(jax.random.key(0), (layers, 3))
    size = (flags.d_model, flags.d_ff, dtype)
    weights = [jax.jit(bench.random_weights, static_argnums=(1, 2, 3))(k[0], *size) for k in keys]
    xs = [bench.random_tokens(k[1], tokens, flags.d_model, dtype) for k in keys]
    extra: list[tuple[Any, ...]] = [()] * layers
    forms = bench.forward_forms(flags.implementation)
    if flags.mode == "train":
        forms = bench.train_forms(flags.implementation)
        dl1 = jnp.full((tokens,), 1e-3, jnp.float32)
        extra = [
            (jax.random.normal(k[2], x.shape).astype(dtype), dl1)
            for k, x in zip(keys, xs, strict=True)
        ]

    def arguments(nnz: float) -> Any:
        active = [bench.with_activity(w, flags.pattern, nnz) for w in weights]
        calls = tuple((x, *w, *e) for x, w, e in zip(xs, active, extra, strict=True))
        return calls if decode else calls[0]

    first = arguments(flags.nnz[0])
    units = layers * (bench.PASSES if decode else 1)
    lowered = {
        name: jax.jit(bench.chained(form) if decode else form).lower(*first)
        for name, form in forms.items()
    }
    built = bench.compile_all(lowered)
    programs = {name: program for name, (program, _) in built.items()}
    seconds = {name: time for name, (_, time) in built.items()}
    for nnz in flags.nnz:
        args = arguments(nnz)
        times = bench.in_turns(programs, {n: args for n in programs}, flags.repeats, flags.calls)
        checked = errors(flags, programs, args)
        yield nnz, [r | checked for r in summary(times, seconds, units)]


def errors(flags: Flags, programs: dict[str, Any], args: Any) -> dict[str, Any]:
    """Errors of the engine and of the dense op against float32, nnz seen and the way taken."""
    one = args[0] if isinstance(args[0], tuple) else args

    def call(*arrays):
        out = gated_ffn(*arrays, implementation=flags.implementation)
        return out.y, out

    def training(*arrays):  # a call that is differentiated chooses by other costs
        return jax.vjp(call, *arrays, has_aux=True)[2]

    run = training if flags.mode == "train" else lambda *arrays: call(*arrays)[1]
    out = jax.jit(run)(*one[:4])
    seen = {"nnz": float(jnp.mean(out.nnz)), "sparse": int(out.sparse or 0)}
    wide = tuple(a.astype(jnp.float32) for a in one)
    with jax.default_matmul_precision("highest"):
        if flags.mode == "forward":
            rows = slice(0, 512)
            truth = jax.jit(bench.dense_three)(wide[0][rows], *wide[1:4])
            dense = jax.jit(bench.dense_three)(one[0][rows], *one[1:4])
            return seen | {
                "error": bench.relative_error(out.y[rows], truth),
                "dense_error": bench.relative_error(dense, truth),
            }
        truth = jax.jit(bench.train_forms("xla")["engine"])(*wide)
    errors = {}
    for name, form in (("error", "engine"), ("dense_error", "dense_op")):
        got = programs[form](*args)
        pairs = zip(GRADIENTS, jax.tree.leaves(got), jax.tree.leaves(truth), strict=True)
        errors[name] = {g: bench.relative_error(a, b) for g, a, b in pairs}
    return seen | errors


def stored_masks(flags: Flags) -> np.ndarray:
    """(layers, sequences, tokens, F) booleans of --masks."""
    if not flags.masks.is_file():
        raise ValueError(f"--masks {flags.masks}: there is no such file")
    try:
        bits = np.unpackbits(np.load(flags.masks)["bits"], axis=-1).astype(bool)
    except (ValueError, KeyError, IndexError):
        raise ValueError(
            f"--masks {flags.masks}: expected an .npz file with an array 'bits', uint8 (layers, "
            "sequences, tokens, F / 8), as numpy.packbits makes it"
        ) from None
    return bits


def bench_real_training(flags: Flags, tokens: int) -> Iterator[tuple[float, list[dict]]]:
    """The whole op on inputs that fire the stored masks of the first D tokens, layer by layer."""
    dtype, bits = jnp.dtype(flags.dtype), stored_masks(flags)
    features = bits.shape[-1]
    keys = jax.random.split(jax.random.key(0), 3)
    _, up, down = bench.random_weights(keys[0], flags.d_model, features, dtype)
    dl1 = jnp.full((tokens,), 1e-3, jnp.float32)
    dy = jax.random.normal(keys[1], (tokens, flags.d_model)).astype(dtype)

    def arguments(index: int) -> tuple[Any, ...]:
        masks = bits[index].reshape(-1, features)[: flags.d_model]
        x, gate = bench.mask_inputs(keys[2], masks, flags.d_model, dtype)
        return x[jnp.arange(tokens) % len(masks)], gate, up, down, dy, dl1

    first = arguments(0)
    forms = bench.train_forms(flags.implementation)
    built = bench.compile_all({name: jax.jit(form).lower(*first) for name, form in forms.items()})
    programs = {name: program for name, (program, _) in built.items()}
    seconds = {name: time for name, (_, time) in built.items()}
    for index in range(len(bits)):
        args = arguments(index)
        times = bench.in_turns(programs, {n: args for n in programs}, flags.repeats, flags.calls)
        checked = errors(flags, programs, args) | {"layer": index, "d_ff": features}
        yield checked["nnz"], [r | checked for r in summary(times, seconds, 1)]


def bench_real(flags: Flags, tokens: int) -> Iterator[tuple[float, list[dict]]]:
    """Stored masks, layer by layer, given to the stages after the gate; the gate timed beside."""
    dtype, bits = jnp.dtype(flags.dtype), stored_masks(flags)
    features, layers = bits.shape[-1], flags.layers
    weights = bench.random_weights(jax.random.key(0), flags.d_model, features, dtype)
    xs = [
        bench.random_tokens(jax.random.key(i), tokens, flags.d_model, dtype) for i in range(layers)
    ]

    @jax.jit
    def pre_activations(masks, key):
        size = jnp.abs(jax.random.normal(key, masks.shape)) + 0.01
        return jnp.where(masks, size, -size).astype(dtype)

    def masks_of(index):
        masks = bits[index].reshape(-1, features)
        return jnp.asarray(np.resize(masks, (tokens, features)))

    pre = pre_activations(masks_of(0), jax.random.key(0))
    dense_args = tuple((x, *weights) for x in xs)
    gate_args = tuple((x, weights[0]) for x in xs)
    forms = {"engine": bench.after_gate_form(tokens, flags.d_model, features, dtype), **bench.DENSE}
    forms["gate"] = lambda x, gate: x @ gate.T
    arguments = dict.fromkeys(bench.DENSE, dense_args) | {"gate": gate_args}
    arguments["engine"] = tuple((x, pre, *weights[1:]) for x in xs)
    lowered = {
        name: jax.jit(bench.repeated(form, layers)).lower(*arguments[name])
        for name, form in forms.items()
    }
    built = bench.compile_all(lowered)
    for index in range(len(bits)):
        masks = masks_of(index)
        pre = pre_activations(masks, jax.random.key(index))
        arguments["engine"] = tuple((x, pre, *weights[1:]) for x in xs)
        programs = {name: program for name, (program, _) in built.items()}
        times = bench.in_turns(programs, arguments, flags.repeats, flags.calls)
        rows = {
            r["implementation"]: r
            for r in summary(times, {n: b[1] for n, b in built.items()}, layers)
        }
        ms = rows["engine"]["ms"] + rows["gate"]["ms"]
        nnz = float(jnp.mean(jnp.sum(masks, axis=1)))
        row = rows["engine"] | {"layer": index, "nnz": nnz, "gate_ms": rows["gate"]["ms"], "ms": ms}
        del row["ms_min"], row["ms_max"]
        row |= {"d_ff": features, "after_gate_ms": rows["engine"]["ms"]}  # the masks', not the flag
        yield nnz, [row | {"ratio": row["dense_ms"] / ms}]


def plot(rows: list[dict], path: Path) -> None:
    """Time against nnz with the break-even density marked."""
    from matplotlib.figure import Figure

    rows = sorted((r for r in rows if r["implementation"] == "engine"), key=lambda r: r["nnz"])
    nnz, ms, dense = ([r[k] for r in rows] for k in ("nnz", "ms", "dense_ms"))
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.plot(nnz, ms, "o-", label="gated_ffn")
    axes.plot(nnz, dense, "s--", label="fastest dense XLA form")
    crossing = [i for i in range(1, len(ms)) if (ms[i - 1] < dense[i - 1]) != (ms[i] < dense[i])]
    if crossing:
        i = crossing[0]
        gap = [m - d for m, d in zip(ms[i - 1 : i + 1], dense[i - 1 : i + 1], strict=True)]
        even = nnz[i - 1] + (nnz[i] - nnz[i - 1]) * gap[0] / (gap[0] - gap[1])
        axes.axvline(even, color="grey", label=f"break-even {even:.0f}")
    axes.set(xlabel="active neurons per token", ylabel="ms", xscale="log", title=rows[0]["device"])
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main(flags: Flags) -> None:
    """Checks flags, runs every combination, prints a table and writes rows."""
    at_least(flags, 1, "tokens", "d_model", "d_ff", "layers", "repeats", "calls")
    at_least(flags, 0, "nnz")
    check_file("--out", flags.out)
    check_file("--plot", flags.plot, *PICTURES)
    if flags.smoke:
        flags = with_smoke(flags, **SMOKE)
    elif flags.implementation == "triton":
        check_gpu("the sparse engine")
    if flags.pattern != "real" and max(flags.nnz) > flags.d_ff:
        raise ValueError(f"--nnz must be at most --d-ff {flags.d_ff}, got {max(flags.nnz):g}")
    interpreted = flags.smoke and jax.default_backend() != "gpu"
    with interpret() if interpreted else contextlib.nullcontext():
        rows = run(flags)
    if flags.plot:
        plot(rows, flags.plot)


def run(flags: Flags) -> list[dict[str, Any]]:
    """Every combination's rows, printed and written as they come."""
    about = records.about() | {"kernel": f"gated_ffn_{flags.mode}", "device": tuning.device_kind()}
    about |= {"pattern": flags.pattern, "dtype": flags.dtype}
    about |= {"d_model": flags.d_model, "d_ff": flags.d_ff}
    real = bench_real_training if flags.mode == "train" else bench_real
    cases = real if flags.pattern == "real" else bench_op
    rows = []
    for tokens in flags.tokens:
        for nnz, new in cases(flags, tokens):
            rows += [about | {"tokens": tokens, "nnz_asked": nnz} | r for r in new]
            for r in new:
                shown = (f"{k}={v:.4g}" for k, v in r.items() if isinstance(v, int | float))
                print(tokens, f"{nnz:g}", r["implementation"], *shown, flush=True)
            if flags.out:
                with flags.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows[-len(new) :])
    return rows


if __name__ == "__main__":
    try:
        main(tyro.cli(Flags))
    except (ValueError, UnsupportedError) as error:
        raise SystemExit(f"bench_ffn.py: {error}") from None
