"""The programs that experiments/bench_model.py times, and the one set of parameters they share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sparsejax.attention import Cache, init_cache
from sparsejax.calibrate import (
    calibrate_gate_bias,
    damp_outputs,
    restore_gate_bias,
    with_gate_bias,
    without_gate_bias,
)
from sparsejax.config import ModelConfig
from sparsejax.decoding import compute_params
from sparsejax.model import Options, forward, logits
from sparsejax.params import init_params
from sparsejax.sharding import MeshConfig, batch_sharding, make_mesh
from sparsejax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from sparsejax.training.state import TrainState, sharded_state, state_template
from sparsejax.training.step import LossConfig, make_train_step
from sparsejax.types import Params

DENSE = ("dense_silu", "dense_relu")
VARIANTS = (*DENSE, "sparse_relu")
PICKED = "picked"
# Adam moves every parameter by up to the learning rate: here by nothing that a float32 keeps.
_STILL = OptimizerConfig(learning_rate=1e-12, schedule="constant", warmup_steps=0)
_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is run.

    Attributes:
      batch_size: sequences B.
      seq_len: tokens per sequence T.
      remat: see `Options`.
      accumulate: microbatches per update.
      decode_steps: tokens per row in one call of decode.
      pattern: see `calibrate_gate_bias`.
      seed: of weights and tokens.
    """

    batch_size: int
    seq_len: int
    remat: str = "none"
    accumulate: int = 1
    decode_steps: int = 32
    pattern: str = "uniform"
    seed: int = 0


class Case:
    """Programs of the variants, and a way to call them on shared buffers.

    Attributes:
      sparse_engine: of the sparse variant; None lets every call choose.
      engines: one per layer; with them there is a fourth variant, "picked".
      compiled: name -> executable, set by the caller before `prepare`.
      mesh: one device.
      tokens_per_call: tokens read or made by one call.
    """

    sparse_engine: str | None = "triton"
    engines: tuple[str | None, ...] | None = None

    def __init__(self, model: ModelConfig, nnz: Sequence[float], shape: Shape):
        self.shape, self.nnz = shape, nnz
        self.model = with_gate_bias(model)
        self.mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
        self.tokens_per_call = shape.batch_size * shape.seq_len
        self.compiled: dict[str, Any] = {}
        self._last: dict[str, dict[int, tuple[Array, Array]]] = {}
        # Two batches in turn; activity is set on both.
        ids = np.random.default_rng(shape.seed).integers(
            0, model.vocab_size, (2, shape.batch_size, shape.seq_len + 1), np.int32
        )
        self.ids = [jax.device_put(batch, batch_sharding(self.mesh)) for batch in ids]

    @property
    def variants(self) -> tuple[str, ...]:
        """What is timed."""
        return VARIANTS if self.engines is None else (*VARIANTS, PICKED)

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of what is compiled: the variants and helpers."""
        return self.variants

    def config(self, variant: str) -> ModelConfig:
        """The model of a variant; SiLU has no gate bias, as dense models have none."""
        return silu(self.model) if variant == "dense_silu" else self.model

    def options(self, variant: str, **changes: Any) -> Options:
        """The engine of a variant."""
        engines = {"sparse_relu": self.sparse_engine, PICKED: self.engines}
        implementation = engines.get(variant, "xla")
        return Options(implementation=implementation, remat=self.shape.remat, **changes)

    def own(self, variant: str, tree: Any) -> Any:
        """The leaves of the shared tree that a variant has; nothing is copied."""
        return without_gate_bias(tree) if variant == "dense_silu" else tree

    def calibrated(self, params: Params) -> Params:
        """`params` with the activity asked for, on the tokens of both batches."""
        params = damp_outputs(params)
        tokens = jnp.concatenate([ids[:, :-1] for ids in self.ids])
        return calibrate_gate_bias(
            self.model, params, tokens, self.nnz, pattern=self.shape.pattern, seed=self.shape.seed
        )

    def lower(self, name: str) -> Any:
        """The program, traced for the shapes of this case."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Makes what the timed calls need beside parameters."""

    def call(self, name: str, i: int) -> Any:
        """Starts call i of a variant; returns arrays to wait for."""
        raise NotImplementedError

    def seen(self, name: str) -> tuple[list[float], list[float]]:
        """nnz of each feed-forward layer, and which ran sparse: means of the batches' last calls.

        A training step tells only how many: one number.
        """
        found = jax.device_get(list(self._last[name].values()))
        nnz, sparse = (np.mean([np.atleast_1d(f[k]) for f in found], axis=0) for k in (0, 1))
        return nnz.astype(np.float64).tolist(), sparse.astype(np.float64).tolist()

    def _keep(self, name: str, i: int, nnz: Array, sparse: Array) -> None:
        self._last.setdefault(name, {})[i % 2] = nnz, sparse


class Train(Case):
    """The update of experiments/train.py; one training state goes through all variants."""

    def __init__(self, model: ModelConfig, nnz: Sequence[float], shape: Shape):
        super().__init__(model, nnz, shape)
        self.optimizer = make_optimizer(_STILL, _STEPS)
        self.schedule = make_schedule(_STILL, _STEPS)
        with jax.set_mesh(self.mesh):
            state = sharded_state(self.model, self.optimizer, self.mesh, shape.seed)
            params = self.calibrated(state.params)
        self.state = TrainState(state.step, params, state.opt_state)
        self.batches = [{"tokens": ids[:, :-1], "targets": ids[:, 1:]} for ids in self.ids]
        self.batches = [jax.device_put(b, batch_sharding(self.mesh)) for b in self.batches]

    def lower(self, name: str) -> Any:
        """See `Case`."""
        config = self.config(name)
        coeff = 0.0 if name == "dense_silu" else 2e-5  # what TrainConfig resolves to
        step = make_train_step(
            config,
            self.optimizer,
            self.schedule,
            LossConfig(l1_coeff=coeff, accumulate=self.shape.accumulate),
            self.options(name),
            self.mesh,
        )
        return step.lower(state_template(config, self.optimizer, self.mesh), self.batches[0])

    def call(self, name: str, i: int) -> Any:
        """See `Case`."""
        # The old state's buffers are donated; biases that a variant does not have stay outside.
        new, metrics = self.compiled[name](self.own(name, self.state), self.batches[i % 2])
        self.state = restore_gate_bias(new, self.state) if name == "dense_silu" else new
        self._keep(name, i, metrics["nnz_per_layer"], metrics["sparse_layers"])
        return metrics["loss"]  # not the state: the next call is given its buffers


class Inference(Case):
    """Parameters in compute dtype."""

    def __init__(self, model: ModelConfig, nnz: Sequence[float], shape: Shape):
        super().__init__(model, nnz, shape)
        with jax.set_mesh(self.mesh):
            params = init_params(self.model, jax.random.key(shape.seed))
            self.params = self.calibrated(compute_params(self.model, params))

    def lower_prefill(self, name: str, slots: int) -> Any:
        """`prefill_program` of a variant."""
        options = self.options(name, fresh_cache=True)
        program = functools.partial(prefill_program, self.config(name), options, slots)
        return jax.jit(program).lower(self.own(name, self.params), self.ids[0][:, :-1])


class Prefill(Inference):
    """Reads B prompts of T tokens, fills the cache and chooses the next ids."""

    def lower(self, name: str) -> Any:
        """See `Case`."""
        return self.lower_prefill(name, self.shape.seq_len)

    def prepare(self) -> None:
        """Cuts the prompts."""
        self.prompts = [ids[:, :-1] for ids in self.ids]

    def call(self, name: str, i: int) -> Any:
        """See `Case`."""
        params, prompts = self.own(name, self.params), self.prompts[i % 2]
        ids, _, nnz, sparse = self.compiled[name](params, prompts)
        self._keep(name, i, nnz, sparse)
        return ids


class Decode(Inference):
    """Makes `decode_steps` tokens in each of B rows, after a prompt of T tokens."""

    @property
    def programs(self) -> tuple[str, ...]:
        """See `Case`."""
        return ("fill", *self.variants)

    def __init__(self, model: ModelConfig, nnz: Sequence[float], shape: Shape):
        super().__init__(model, nnz, shape)
        self.tokens_per_call = shape.batch_size * shape.decode_steps
        self.slots = shape.seq_len + shape.decode_steps
        # Ids to feed: a model of random weights would repeat one id, and so one pattern.
        rng = np.random.default_rng(shape.seed + 1)
        fed = rng.integers(0, model.vocab_size, (shape.batch_size, shape.decode_steps), np.int32)
        self.fed = jax.device_put(fed, batch_sharding(self.mesh))

    def lower(self, name: str) -> Any:
        """See `Case`."""
        if name == "fill":
            return self.lower_prefill("dense_relu", self.slots)
        program = functools.partial(
            decode_program, self.config(name), self.options(name), self.shape.seq_len
        )
        cache = jax.eval_shape(
            functools.partial(init_cache, self.model, self.shape.batch_size, self.slots)
        )
        params = self.own(name, self.params)
        return jax.jit(program, donate_argnums=1).lower(params, cache, self.fed)

    def prepare(self) -> None:
        """Fills the cache with the prompts."""
        _, self.cache, *_ = self.compiled["fill"](self.params, self.ids[0][:, :-1])

    def call(self, name: str, i: int) -> Any:
        """See `Case`. Every call starts behind the prompt again."""
        del i
        params = self.own(name, self.params)
        ids, self.cache, nnz, sparse = self.compiled[name](params, self.cache, self.fed)
        self._keep(name, 0, nnz, sparse)  # always the same tokens
        return ids


CASES: dict[str, type[Case]] = {"train": Train, "prefill": Prefill, "decode": Decode}


def make_case(
    mode: Literal["train", "prefill", "decode"],
    model: ModelConfig,
    nnz: Sequence[float],
    shape: Shape,
) -> Case:
    """The case of a mode, with parameters on the device and activity `nnz` per ReLU layer."""
    return CASES[mode](model, nnz, shape)


def silu(model: ModelConfig) -> ModelConfig:
    """The model with SiLU in the place of ReLU, and without gate biases."""
    layers = tuple(
        layer
        if layer.ffn is None
        else dataclasses.replace(
            layer, ffn=dataclasses.replace(layer.ffn, activation="silu", gate_bias=False)
        )
        for layer in model.layers
    )
    return model.replace(layers=layers)


def prefill_program(
    config: ModelConfig, options: Options, slots: int, params: Params, tokens: Array
):
    """Next ids (B,), the cache, nnz (L,) and which layers ran sparse (L,)."""
    cache = init_cache(config, tokens.shape[0], slots)
    out = forward(config, params, tokens, cache=cache, options=options)
    ids = jnp.argmax(logits(config, params, out.hidden[:, -1:])[:, 0], axis=-1)
    nnz = jnp.mean(out.stats.nnz.astype(jnp.float32), axis=(1, 2))
    return ids, out.cache, nnz, out.stats.sparse


def decode_program(
    config: ModelConfig, options: Options, start: int, params: Params, cache: Cache, fed: Array
):
    """Ids (B, n) chosen after each of the ids `fed` (B, n); the cache, nnz and sparse (L,)."""
    rows, steps = fed.shape

    def step(i, carry):
        cache, ids, nnz, sparse = carry
        token = jax.lax.dynamic_slice_in_dim(fed, i, 1, axis=1)
        positions = jnp.full((rows, 1), start, jnp.int32) + i
        out = forward(config, params, token, positions=positions, cache=cache, options=options)
        new = jnp.argmax(logits(config, params, out.hidden), axis=-1)
        ids = jax.lax.dynamic_update_slice_in_dim(ids, new.astype(jnp.int32), i, axis=1)
        nnz = nnz + jnp.mean(out.stats.nnz.astype(jnp.float32), axis=(1, 2)) / steps
        return out.cache, ids, nnz, sparse + out.stats.sparse / steps

    none = jnp.zeros((len(config.ffn_layers),), jnp.float32)
    carry = (cache, jnp.zeros_like(fed), none, none)
    cache, ids, nnz, sparse = jax.lax.fori_loop(0, steps, step, carry)
    return ids, cache, nnz, sparse
