"""Times `gated_ffn` against the fastest dense XLA form, with a chosen number of active neurons.

    python experiments/bench_ffn.py --nnz 15 30 60 --pattern uniform --out rows.jsonl --plot f.png
    python experiments/bench_ffn.py --tokens 1 8 32 --nnz 30          # decode: 8 layers in turn
    python experiments/bench_ffn.py --pattern real --masks FILE.npz   # stored activation patterns

Patterns come from the weights, so the timed op is the public one: x[:, 0] is constant and
gate[n, 0] holds neuron n's threshold. Engine and dense forms take turns inside every repetition, on
rotating inputs, so that clocks and caches treat them alike; a row's `ms` is the median.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import UnsupportedError, gated_ffn
from pallas_kernels.gated_ffn import config as configs
from pallas_kernels.gated_ffn import pallas_triton
from pallas_kernels.gated_ffn.reference import is_active

ANCHOR = 8.0  # x[:, 0]


def relu(pre):
    """max(pre, 0), NaN kept."""
    return jnp.where(is_active(pre), pre, jnp.zeros_like(pre))


def dense_three(x, gate, up, down, both):
    """Three matmuls."""
    del both
    return (relu(x @ gate.T) * (x @ up.T)) @ down


def dense_stacked(x, gate, up, down, both):
    """Gate and up as one batched matmul over weights (2, F, D)."""
    del gate, up
    out = jnp.einsum("md,cfd->mcf", x, both)
    return (relu(out[:, 0]) * out[:, 1]) @ down


def dense_concat(x, gate, up, down, both):
    """Gate and up as one matmul over weights (2 F, D)."""
    features = gate.shape[0]
    out = x @ both.reshape(2 * features, -1).T
    return (relu(out[:, :features]) * out[:, features:]) @ down


DENSE = {"three": dense_three, "stacked": dense_stacked, "concat": dense_concat}


def firing_rates(pattern: str, features: int, nnz: float, seed: int) -> np.ndarray:
    """Probability of firing per neuron; sums to nnz (power law: rank ** -1, capped at 0.9)."""
    if pattern == "uniform" or nnz >= features:
        return np.full(features, min(1.0, nnz / features))
    rate = 1.0 / np.arange(1, features + 1)
    for _ in range(50):
        rate = np.minimum(rate * nnz / rate.sum(), 0.9)
    return np.random.default_rng(seed).permutation(rate)


def layer(key, pattern, width, features, nnz, dtype):
    """gate, up, down (F, D) whose gate fires with the pattern's rates on inputs of `tokens_of`."""
    keys = jax.random.split(key, 3)
    gate, up, down = (jax.random.normal(k, (features, width)) * width**-0.5 for k in keys)
    rate = firing_rates(pattern, features, nnz, 0)
    quantile = [statistics.NormalDist().inv_cdf(min(max(1 - r, 1e-9), 1 - 1e-9)) for r in rate]
    threshold = np.where(rate >= 1, -8.0, quantile)
    gate = gate.at[:, 0].set(jnp.asarray(-threshold / ANCHOR, jnp.float32))
    return tuple(w.astype(dtype) for w in (gate, up, down))


def tokens_of(key, tokens, width, dtype):
    """x (M, D), its first entry the constant that the gate's thresholds multiply."""
    return jax.random.normal(key, (tokens, width)).at[:, 0].set(ANCHOR).astype(dtype)


def in_turns(functions: dict, argument_sets: list, repeats: int, calls: int) -> dict:
    """name -> (compile seconds, sorted ms per call), one after the other in every repetition."""
    compiled, seconds, times = {}, {}, {name: [] for name in functions}
    for name, function in functions.items():
        start = time.perf_counter()
        compiled[name] = jax.jit(function).lower(*argument_sets[0]).compile()
        seconds[name] = time.perf_counter() - start
        for arguments in argument_sets:
            jax.block_until_ready(compiled[name](*arguments))
    for _ in range(repeats):
        for name, function in compiled.items():
            start = time.perf_counter()
            for i in range(calls - 1):
                function(*argument_sets[i % len(argument_sets)])
            out = function(*argument_sets[0])
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / calls * 1e3)
    return {name: (seconds[name], sorted(values)) for name, values in times.items()}


def errors(x, gate, up, down, implementation):
    """Relative error of the engine and of dense against float32, and nnz seen, on 512 tokens."""
    x = x[:512]
    exact = [a.astype(jnp.float32) for a in (x, gate, up, down)]
    with jax.default_matmul_precision("highest"):
        wide = jax.jit(dense_three)(*exact, None)
    out = jax.jit(functools.partial(gated_ffn, implementation=implementation))(x, gate, up, down)
    error = [
        float(jnp.linalg.norm(y.astype(jnp.float32) - wide) / jnp.linalg.norm(wide))
        for y in (out.y, jax.jit(dense_three)(x, gate, up, down, None))
    ]
    return {"error": error[0], "dense_error": error[1], "nnz": float(jnp.mean(out.nnz))}


def summary(times: dict, layers: int, kernel: str) -> list[dict]:
    """One row per timed function, each with the fastest dense form's median and the ratio."""
    best = min(statistics.median(v) for n, (_, v) in times.items() if n.startswith("dense"))
    rows = []
    for name, (seconds, values) in times.items():
        ms = statistics.median(values) / layers
        rows.append(
            {"kernel": kernel, "implementation": name, "ms": ms, "ms_min": values[0] / layers}
            | {
                "ms_max": values[-1] / layers,
                "dense_ms": best / layers,
                "ratio": best / layers / ms,
            }
            | {"compile_s": seconds}
        )
    return rows


def bench(args, tokens: int, nnz: float) -> list[dict]:
    """One shape and density of the public op; up to 64 tokens, several layers per call."""
    dtype = jnp.dtype(args.dtype)
    layers = args.layers if tokens <= 64 else 1
    keys = jax.random.split(jax.random.key(0), layers)
    shape = (args.pattern, args.d_model, args.d_ff, nnz, dtype)
    weights = [jax.jit(layer, static_argnums=(1, 2, 3, 4, 5))(k, *shape) for k in keys]
    stacked = [(*w, jnp.stack(w[:2])) for w in weights]
    inputs = [
        [tokens_of(jax.random.key(10 * i + j), tokens, args.d_model, dtype) for j in range(layers)]
        for i in range(2)
    ]

    def over_layers(function):
        if args.mode == "train":

            def loss(x, *w):
                return jnp.sum(function(x, *w).astype(jnp.float32) ** 2)

            timed = jax.grad(loss, argnums=(0, 1, 2, 3))
        else:
            timed = function
        return lambda xs, ws: [timed(x, *w) for x, w in zip(xs, ws, strict=True)]

    def op(x, gate, up, down, both):
        del both
        return gated_ffn(x, gate, up, down, implementation=args.implementation).y

    functions = {"engine": op} | {f"dense_{name}": f for name, f in DENSE.items()}
    functions = {name: over_layers(f) for name, f in functions.items()}
    sets = [(x, stacked) for x in inputs]
    times = in_turns(functions, sets, args.repeats, args.calls)
    gate, up, down = weights[0]
    extra = errors(inputs[0][0], gate, up, down, args.implementation)
    return [r | extra for r in summary(times, layers, f"gated_ffn_{args.mode}")]


def bench_real(args, tokens: int) -> list[dict]:
    """Stored masks, layer by layer, given to the stages after the gate; the gate timed beside."""
    dtype = jnp.dtype(args.dtype)
    width = args.d_model
    bits = np.unpackbits(np.load(args.masks)["bits"], axis=-1).astype(bool)
    features = bits.shape[-1]
    gate, up, down = layer(jax.random.key(0), "uniform", width, features, 30, dtype)
    both = jnp.stack([gate, up])
    config = configs.default(width, features, dtype.itemsize)
    rows = []
    for index, masks in enumerate(bits):
        masks = jnp.asarray(masks.reshape(-1, features))
        masks = jnp.tile(masks, (tokens // masks.shape[0], 1))
        size = jnp.abs(jax.random.normal(jax.random.key(index), masks.shape)) + 0.01
        pre = jnp.where(masks, size, -size).astype(dtype)
        sets = [(tokens_of(jax.random.key(i), tokens, width, dtype), pre) for i in range(2)]
        after = functools.partial(pallas_triton.after_gate, gated=True, config=config)
        functions = {
            "after_gate": lambda x, p, after=after: after(x, p, up, down),
            "gate": lambda x, p: x @ gate.T,
        } | {f"dense_{n}": lambda x, p, f=f: f(x, gate, up, down, both) for n, f in DENSE.items()}
        times = in_turns(functions, sets, args.repeats, args.calls)
        got = {r["implementation"]: r for r in summary(times, 1, "gated_ffn_real")}
        ms = got["after_gate"]["ms"] + got["gate"]["ms"]
        nnz = float(jnp.mean(jnp.sum(masks, axis=1)))
        best = got["gate"]["dense_ms"]
        rows.append(
            {"kernel": "gated_ffn_real", "implementation": "engine", "layer": index, "nnz": nnz}
            | {"ms": ms, "gate_ms": got["gate"]["ms"], "dense_ms": best, "ratio": best / ms}
        )
    return rows


def plot(rows: list[dict], path: str) -> None:
    """Time against nnz with the break-even density marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sorted((r for r in rows if r["implementation"] == "engine"), key=lambda r: r["nnz"])
    nnz, ms, dense = ([r[k] for r in rows] for k in ("nnz", "ms", "dense_ms"))
    figure, axes = pyplot.subplots(figsize=(6, 4))
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


def main() -> None:
    """Parses flags, runs every combination, prints a table and writes rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=["forward", "train"], default="forward")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--d-model", type=int, default=2048)
    parser.add_argument("--d-ff", type=int, default=5632)
    parser.add_argument("--nnz", type=float, nargs="+", default=[15, 30, 60, 120])
    parser.add_argument("--pattern", choices=["uniform", "powerlaw", "real"], default="uniform")
    parser.add_argument("--masks", default="../shared/data/activations/d1024_l12_f2816.npz")
    parser.add_argument("--implementation", default="triton")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=8, help="weights in turn, up to 64 tokens")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--out", default=None, help="JSON lines, appended")
    parser.add_argument("--plot", default=None)
    args = parser.parse_args()
    sha = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "git": sha}
    rows = []
    for tokens in args.tokens:
        cases = [None] if args.pattern == "real" else args.nnz
        for nnz in cases:
            new = bench_real(args, tokens) if nnz is None else bench(args, tokens, nnz)
            keys = {
                "d_model": args.d_model,
                "d_ff": args.d_ff,
                "pattern": args.pattern,
                "dtype": args.dtype,
            }
            rows += [about | keys | {"tokens": tokens, "nnz_asked": nnz} | r for r in new]
            for r in new:
                shown = (f"{k}={v:.4g}" for k, v in r.items() if isinstance(v, int | float))
                print(tokens, nnz, r["implementation"], *shown, flush=True)
    if args.out:
        with Path(args.out).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    try:
        main()
    except UnsupportedError as error:
        raise SystemExit(f"bench_ffn.py: {error}") from None
