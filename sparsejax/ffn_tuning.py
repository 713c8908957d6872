"""What experiments/tune_ffn.py sweeps: fields of `FFNConfig`, what is timed, and what is chosen.

One field at a time, from the shape's default on: all values of a field are compiled side by side
and timed in turns, and the best one is kept for the fields that follow. Up to `decode_tokens`
tokens layers are chained as in decoding; beyond, forward is the stages after the gate (the gate is
XLA's, whatever the configuration), and training the whole call with its gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import FFNConfig, gated_ffn
from pallas_kernels.gated_ffn import config as configs
from pallas_kernels.gated_ffn import pallas_triton, pallas_triton_decode
from pallas_kernels.gated_ffn.api import engine
from pallas_kernels.gated_ffn.pallas_triton_backward import entries_per_token
from sparsejax import ffn_benchmark as bench

Candidates = dict[str, tuple[int, ...]]

FORWARD: Candidates = {
    "list_chunk": (512, 1024, 2048),
    "list_warps": (1, 2, 4),
    "walk_warps": (1, 2, 4, 8),
}
BACKWARD: Candidates = {
    "grad_hidden_warps": (1, 2, 4),
    "grad_hidden_unroll": (1, 2, 4, 8),
    "grad_warps": (1, 2, 4, 8),
    "grad_unroll": (1, 2, 4),
    "grad_columns": (128, 256, 512),
    "grad_weights_warps": (1, 2),
    "grad_unroll_weights": (2, 4, 8),
    "grad_segment": (256, 512, 1024),
}
DECODE: Candidates = {
    "decode_neurons": (16, 32),  # a dot's sides are at least 16
    "decode_depth": (128, 256, 512),
}
LAYERS = 8  # weights that decoding walks through: one layer's would stay in the cache
LEAST_GAIN = 0.01  # what is faster by less is taken for noise
# Of results under two configurations, which differ in the order of float32 sums.
BOUNDS = {"bfloat16": 1e-2, "float32": 1e-4}


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer and what of it is timed.

    Attributes:
      mode: forward, or results and gradients.
      tokens: M.
      d_model: D.
      d_ff: F.
      dtype: of x and the weights.
      nnz: active neurons per token, each a case of its own.
      pattern: see `ffn_benchmark.firing_rates`.
    """

    mode: Literal["forward", "train"]
    tokens: int
    d_model: int
    d_ff: int
    dtype: str
    nnz: tuple[float, ...]
    pattern: str = "uniform"

    @property
    def start(self) -> FFNConfig:
        """The shape's default, made to run the kernels that it configures, whatever it is given."""
        size = (self.tokens, self.d_model, self.d_ff)
        config = configs.default(*size, self.dtype)
        return dataclasses.replace(config, choice="sparse", walk_limit=config.list_width)

    @property
    def decodes(self) -> bool:
        """Whether the decode kernels run."""
        return self.tokens <= self.start.decode_tokens

    def fields(self) -> Candidates:
        """Fields that are swept unless told otherwise, with their values.

        Raises:
          ValueError: nothing that could be tuned runs, or not for every `nnz`.
          UnsupportedError: the engine cannot run the shape.
        """
        x = jax.ShapeDtypeStruct((self.tokens, self.d_model), jnp.dtype(self.dtype))
        weight = jax.ShapeDtypeStruct((self.d_ff, self.d_model), x.dtype)
        engine(x, weight, weight, implementation="triton")
        if self.decodes and self.mode == "train":
            raise ValueError(
                f"tokens must be more than {self.start.decode_tokens} in training, got "
                f"{self.tokens}: with fewer the backward pass is dense, with nothing to tune"
            )
        if self.tokens <= pallas_triton_decode.VECTOR_TOKENS:
            raise ValueError(
                f"tokens must be more than {pallas_triton_decode.VECTOR_TOKENS}, got "
                f"{self.tokens}: the kernel that decodes fewer has nothing to tune"
            )
        if max(self.nnz) > self.d_ff:
            raise ValueError(f"nnz must be at most F = {self.d_ff}, got {max(self.nnz):g}")
        if self.decodes:
            return DECODE
        training = self.mode == "train"
        room = self.start.list_width
        if training:
            room = entries_per_token(self.d_ff, self.start)
        if max(self.nnz) > 0.9 * room:
            raise ValueError(
                f"nnz must be at most {0.9 * room:g}{' in training' if training else ''} for F = "
                f"{self.d_ff}, got {max(self.nnz):g}: lists have room for {room} active neurons "
                "per token, and what is beyond is computed densely"
            )
        return BACKWARD if training else FORWARD

    def known_fields(self) -> Candidates:
        """Fields that may be asked for: training runs the forward kernels too."""
        own = self.fields()
        return FORWARD | own if self.mode == "train" else own

    def form(self, config: FFNConfig) -> Callable[..., Any]:
        """The function that is timed, of what `arguments` returns."""
        if self.mode == "train":
            return bench.train_form("triton", config=config)
        if not self.decodes:
            return functools.partial(pallas_triton.after_gate, gated=True, config=config)

        def decode(x, gate, up, down):
            return gated_ffn(x, gate, up, down, implementation="triton", config=config).y

        return bench.chained(decode)

    @property
    def layers(self) -> int:
        """Layers that one call of the timed function runs."""
        return LAYERS * bench.PASSES if self.decodes else 1

    def arguments(self) -> dict[float, tuple[Any, ...]]:
        """nnz -> arguments of the timed function; cases share what does not depend on nnz."""
        dtype = jnp.dtype(self.dtype)
        random_weights = jax.jit(
            lambda key: bench.random_weights(key, self.d_model, self.d_ff, dtype)
        )
        gate_matmul = jax.jit(lambda x, gate: x @ gate.T)
        made: list[Any] = []
        for key in jax.random.split(jax.random.key(0), LAYERS if self.decodes else 1):
            keys = jax.random.split(key, 3)
            x = bench.random_tokens(keys[1], self.tokens, self.d_model, dtype)
            made.append(
                (x, random_weights(keys[0]), jax.random.normal(keys[2], x.shape).astype(dtype))
            )
        dl1 = jnp.full((self.tokens,), 1e-3, jnp.float32)

        def layer(nnz, x, weights, dy):
            gate, up, down = bench.with_activity(weights, self.pattern, nnz)
            if self.mode == "train":
                return x, gate, up, down, dy, dl1
            if self.decodes:
                return x, gate, up, down
            return x, gate_matmul(x, gate), up, down

        calls = {nnz: tuple(layer(nnz, *m) for m in made) for nnz in self.nnz}
        return calls if self.decodes else {nnz: call[0] for nnz, call in calls.items()}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One value of a field.

    Attributes:
      field, value: what was tried.
      times: nnz -> sorted ms per layer, one of each repetition; empty where it does not run.
      error: why it does not run.
      chosen: whether it was kept.
    """

    field: str
    value: int
    times: Mapping[float, Sequence[float]]
    error: str | None = None
    chosen: bool = False

    def ms(self, nnz: float) -> float:
        """The median, where it runs."""
        return statistics.median(self.times[nnz])


def choose(current: int, medians: Mapping[int, Sequence[float]]) -> int:
    """The value whose times, relative to the current one's, add up to the least.

    Args:
      current: the value to keep unless another is faster by more than `LEAST_GAIN`.
      medians: value -> ms of every case; values that do not run are left out.
    """

    def score(value: int) -> float:
        return sum(ms / own for ms, own in zip(medians[value], medians[current], strict=True))

    best = min(medians, key=score)
    return best if score(best) < (1 - LEAST_GAIN) * score(current) else current


class Tuner:
    """Coordinate descent over the fields of a case.

    Attributes:
      config: the best configuration so far, from `case.start` on.
      compiled: programs compiled so far.
    """

    def __init__(self, case: Case, *, repeats: int, calls: int):
        """Makes the arguments; times are of `repeats` repetitions of `calls` calls each."""
        self.case, self.repeats, self.calls = case, repeats, calls
        self.config = case.start
        self.compiled = 0
        self._arguments = case.arguments()
        self._programs: dict[FFNConfig, Any] = {}

    def sweep(self, field: str, values: Sequence[int]) -> list[Trial]:
        """Times the values of a field and the one it has, and keeps the best in `config`.

        Raises:
          RuntimeError: the configuration that the field began with does not run.
        """
        current = getattr(self.config, field)
        values = sorted({*values, current})
        tried = {v: dataclasses.replace(self.config, **{field: v}) for v in values}
        errors = self._build(list(tried.values()))
        if self.config in errors:
            raise RuntimeError(f"{self.config} does not run: {errors[self.config]}")
        running = {str(v): self._programs[c] for v, c in tried.items() if c not in errors}
        times: dict[int, dict[float, list[float]]] = {int(v): {} for v in running}
        for nnz, arguments in self._arguments.items():
            took = bench.in_turns(
                running, dict.fromkeys(running, arguments), self.repeats, self.calls
            )
            for v, ms in took.items():
                times[int(v)][nnz] = [one / self.case.layers for one in ms]
        medians = {v: [statistics.median(ms) for ms in own.values()] for v, own in times.items()}
        chosen = choose(current, medians)
        self.config = tried[chosen]
        kept = (self.case.start, self.config)
        self._programs = {c: p for c, p in self._programs.items() if c in kept}
        return [
            Trial(field, v, times.get(v, {}), errors.get(c), v == chosen) for v, c in tried.items()
        ]

    def check(self) -> float:
        """Largest relative error of any result of `config` against the default's, over all nnz.

        Raises:
          RuntimeError: it is beyond the dtype's bound, or not a number.
        """
        pair = (self.case.start, self.config)
        failed = self._build(list(pair))
        if failed:
            raise RuntimeError(f"it does not run any more: {failed}")
        worst, bound = 0.0, BOUNDS[self.case.dtype]
        for nnz, arguments in self._arguments.items():
            wanted, got = (jax.tree.leaves(self._programs[c](*arguments)) for c in pair)
            for a, b in zip(got, wanted, strict=True):
                error = bench.relative_error(a, b)
                if not error <= bound:
                    raise RuntimeError(
                        f"at {nnz:g} active neurons a result {list(a.shape)} is {error:.2g} away "
                        f"from the default configuration's, more than {bound:g}: {self.config}"
                    )
                worst = max(worst, error)
        return worst

    def _build(self, wanted: Sequence[FFNConfig]) -> dict[FFNConfig, str]:
        """Compiles what is not there yet; returns what does not compile or run, and why."""
        errors: dict[FFNConfig, str] = {}
        lowered: dict[str, Any] = {}
        first = next(iter(self._arguments.values()))
        new = [c for c in dict.fromkeys(wanted) if c not in self._programs]
        for config in new:
            # A configuration may fail anywhere between tracing and launch; that is its result.
            try:
                lowered[str(config)] = _Attempt(jax.jit(self.case.form(config)).lower(*first))
            except Exception as error:
                errors[config] = _first_line(error)
        self.compiled += len(lowered)
        built = bench.compile_all(lowered)
        for config in new:
            if config in errors:
                continue
            program, _ = built[str(config)]
            if not isinstance(program, Exception):
                try:
                    jax.block_until_ready(program(*first))
                except jax.errors.JaxRuntimeError as error:
                    program = error
            if isinstance(program, Exception):
                errors[config] = _first_line(program)
            else:
                self._programs[config] = program
        return errors


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """A lowered program whose `compile` returns the error where there is one."""

    lowered: Any

    def compile(self) -> Any:
        try:
            return self.lowered.compile()
        except Exception as error:
            return error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
