"""What experiments/bench_ffn.py times: inputs with a chosen activity, dense opponents, programs.

Patterns come from the weights, so the timed op is the public one: x[:, 0] is constant and
gate[n, 0] holds neuron n's threshold. One compiled program serves every activity of a shape.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import gated_ffn
from pallas_kernels.gated_ffn import config as configs
from pallas_kernels.gated_ffn import pallas_triton
from pallas_kernels.gated_ffn.reference import is_active

ANCHOR = 8.0  # x[:, 0]

Weights = tuple[Array, Array, Array]


def relu(pre: Array) -> Array:
    """max(pre, 0), NaN kept."""
    return jnp.where(is_active(pre), pre, jnp.zeros_like(pre))


def dense_three(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """Three matmuls."""
    return (relu(x @ gate.T) * (x @ up.T)) @ down


def dense_stacked(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """Gate and up as one batched matmul over weights (2, F, D), stacked in the program."""
    out = jnp.einsum("md,cfd->mcf", x, jnp.stack([gate, up]))
    return (relu(out[:, 0]) * out[:, 1]) @ down


def dense_concat(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """Gate and up as one matmul over weights (2 F, D), put together in the program."""
    features = gate.shape[0]
    out = x @ jnp.concatenate([gate, up]).T
    return (relu(out[:, :features]) * out[:, features:]) @ down


DENSE: dict[str, Callable[..., Array]] = {
    "dense_three": dense_three,
    "dense_stacked": dense_stacked,
    "dense_concat": dense_concat,
}


def firing_rates(pattern: str, features: int, nnz: float, seed: int = 0) -> np.ndarray:
    """Probability of firing per neuron; sums to nnz (power law: rank ** -1, capped at 0.9)."""
    if pattern == "uniform" or nnz >= features:
        return np.full(features, min(1.0, nnz / features))
    rate = 1.0 / np.arange(1, features + 1)
    for _ in range(50):
        rate = np.minimum(rate * nnz / rate.sum(), 0.9)
    return np.random.default_rng(seed).permutation(rate)


def random_weights(key: Array, width: int, features: int, dtype: Any) -> Weights:
    """gate, up, down (F, D), normal with variance 1 / D."""
    keys = jax.random.split(key, 3)
    shape = (features, width)
    gate, up, down = ((jax.random.normal(k, shape) * width**-0.5).astype(dtype) for k in keys)
    return gate, up, down


def with_activity(weights: Weights, pattern: str, nnz: float) -> Weights:
    """The weights with thresholds that let neurons fire at the pattern's rates."""
    gate, up, down = weights
    rate = firing_rates(pattern, gate.shape[0], nnz)
    normal = statistics.NormalDist()
    quantile = [normal.inv_cdf(min(max(1 - r, 1e-9), 1 - 1e-9)) for r in rate]
    threshold = np.where(rate >= 1, -8.0, quantile)
    return gate.at[:, 0].set(jnp.asarray(-threshold / ANCHOR, gate.dtype)), up, down


def random_tokens(key: Array, tokens: int, width: int, dtype: Any) -> Array:
    """x (M, D), its first entry the constant that the gate's thresholds multiply."""
    return jax.random.normal(key, (tokens, width)).at[:, 0].set(ANCHOR).astype(dtype)


def mask_inputs(key: Array, masks: np.ndarray, width: int, dtype: Any) -> tuple[Array, Array]:
    """x (T, D) and gate (F, D) whose pre-activations have the signs of masks (T, F), T up to D.

    x = sqrt(D) Q with orthonormal rows Q, gate = s^T x / D, so x gate^T = s: normal in size, 0.1 at
    least, where rounding in bfloat16 moves it by some 0.002.
    """
    count = len(masks)
    if count > width:
        raise ValueError(f"masks of {count} tokens: at most D = {width} can be met exactly")
    keys = jax.random.split(key)
    x = jnp.linalg.qr(jax.random.normal(keys[0], (width, count)))[0].T * width**0.5
    size = jnp.abs(jax.random.normal(keys[1], masks.shape)) + 0.1
    with jax.default_matmul_precision("highest"):
        gate = jnp.where(masks, size, -size).T @ x / width
    return x.astype(dtype), gate.astype(dtype)


def forward_forms(implementation: str) -> dict[str, Callable[..., Any]]:
    """name -> function of (x, gate, up, down): the engine and the dense opponents."""

    def engine(x, gate, up, down):
        return gated_ffn(x, gate, up, down, implementation=implementation).y

    return {"engine": engine, **DENSE}


def train_form(implementation: str, **options: Any) -> Callable[..., Any]:
    """(x, gate, up, down, dy, dl1) -> (y, l1) of `gated_ffn` and their gradients for all four."""

    def op(x, gate, up, down):
        out = gated_ffn(x, gate, up, down, implementation=implementation, **options)
        return out.y, out.l1

    return _with_gradients(op, with_l1=True)


def train_forms(implementation: str) -> dict[str, Callable[..., Any]]:
    """name -> function of (x, gate, up, down, dy, dl1): results and gradients of all four.

    `engine_full` keeps both projections for the backward pass.
    """
    forms = {"engine": train_form(implementation), "dense_op": train_form("xla")}
    if implementation == "triton":
        forms["engine_full"] = train_form("triton", residuals="full")
    return forms | {name: _with_gradients(form, with_l1=False) for name, form in DENSE.items()}


def _with_gradients(function: Callable[..., Any], *, with_l1: bool) -> Callable[..., Any]:
    def run(x, gate, up, down, dy, dl1):
        out, back = jax.vjp(function, x, gate, up, down)
        return out, back((dy, dl1) if with_l1 else dy)

    return run


def after_gate_form(tokens: int, width: int, features: int, dtype: Any) -> Callable[..., Any]:
    """The stages after the gate, as a function of (x, pre, up, down)."""
    config = configs.default(tokens, width, features, dtype)
    return functools.partial(pallas_triton.after_gate, gated=True, config=config)


def repeated(form: Callable[..., Any], layers: int) -> Callable[..., Any]:
    """`form` over `layers` argument tuples in one program, so that launching is not what counts."""
    return form if layers == 1 else lambda *calls: [form(*c) for c in calls]


PASSES = 4  # of `chained`


def chained(form: Callable[..., Any]) -> Callable[..., Any]:
    """`form` over argument tuples (x, ...), `PASSES` times, each call waiting for the one before.

    As decoding runs: the host starts one program for many layers. Inputs stay what they are (the
    last result counts zero times), and so does the activity.
    """

    def run(*calls):
        def one_pass(_, y):
            for x, *weights in calls:
                y = form(x + 0 * y, *weights)
            return y

        return jax.lax.fori_loop(0, PASSES, one_pass, jnp.zeros_like(calls[0][0]))

    return run


def compile_all(lowered: Mapping[str, Any]) -> dict[str, tuple[Any, float]]:
    """name -> (executable, seconds), compiled side by side."""

    def build(program: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        return program.compile(), time.perf_counter() - start

    with ThreadPoolExecutor() as pool:
        return dict(zip(lowered, pool.map(build, lowered.values()), strict=True))


def in_turns(
    programs: Mapping[str, Any], arguments: Mapping[str, Sequence[Any]], repeats: int, calls: int
) -> dict[str, list[float]]:
    """name -> sorted ms per call; every repetition runs all programs one after the other."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for name, program in programs.items():
        jax.block_until_ready(program(*arguments[name]))
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            for _ in range(calls - 1):
                program(*arguments[name])
            jax.block_until_ready(program(*arguments[name]))
            times[name].append((time.perf_counter() - start) / calls * 1e3)
    return {name: sorted(values) for name, values in times.items()}


def relative_error(got: Any, wanted: Any) -> float:
    """||got - wanted|| / ||wanted||, in float32."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    return float(jnp.linalg.norm((got - wanted).ravel()) / jnp.linalg.norm(wanted.ravel()))
