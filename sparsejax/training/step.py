"""One training step and one evaluation step, as jitted functions of (state, batch)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparsejax.config import ModelConfig
from sparsejax.losses import DEFAULT_CHUNK, cross_entropy, l1_coefficient
from sparsejax.model import Options, head_weight
from sparsejax.params import path_string
from sparsejax.sharding import batch_sharding
from sparsejax.training.neurons import revive
from sparsejax.training.objective import Batch, LanguageModel, Objective, run_model
from sparsejax.training.state import TrainState, state_template
from sparsejax.types import Params

Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """loss = mean cross-entropy + l1 coefficient * mean over layers and tokens of sum_n |h_n|.

    Attributes:
      l1_coeff: coefficient of the sparsity term. None takes 2e-5, the published value for d 2048
        and tens of thousands of steps; 1e-2 for "tiny" (short runs of small models need 50 to
        500 times as much); and 0 for dense presets.
      l1_start: updates before the term sets in.
      l1_ramp: updates over which it then grows linearly to l1_coeff.
      vocab_chunk: vocabulary entries whose logits exist at a time.
      revive_dead: share of fresh N(0, init_std^2) mixed into the gate rows of neurons that fired
        on no token of the step; 0 turns it off, 0.1 is the published value.
      accumulate: microbatches whose gradients are averaged before one update.
    """

    l1_coeff: float | None = None
    l1_start: int = 0
    l1_ramp: int = 0
    vocab_chunk: int = DEFAULT_CHUNK
    revive_dead: float = 0.0
    accumulate: int = 1

    def __post_init__(self):
        for name in ("l1_coeff", "l1_start", "l1_ramp"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if not 0 <= self.revive_dead <= 1:
            raise ValueError(f"revive_dead must be in [0, 1], got {self.revive_dead}")
        for name in ("vocab_chunk", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def make_train_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    loss: LossConfig,
    options: Options,
    mesh: Mesh,
    seed: int = 0,
    objective: Objective | None = None,
) -> Any:
    """The jitted update `(state, batch) -> (state, metrics)`; the state's buffers are donated.

    With an objective that has frozen arrays it is `(state, batch, frozen)`.

    Args:
      config: the model.
      optimizer: from `make_optimizer`.
      schedule: its learning rate, for the metrics.
      loss: terms of the loss and gradient accumulation.
      options: how the forward pass runs.
      mesh: where state (by the sharding rules) and batch (rows over data and fsdp) live.
      seed: seeds the draws that revive dead neurons.
      objective: what is minimised besides the sparsity term; None for the cross-entropy.

    Returns:
      The function. Its batch is {"tokens", "targets"} (B, T) int32 and optionally "segment_ids",
      "positions" and "loss_mask" (B, T). Its metrics are replicated: the objective's terms (ce for
      the cross-entropy), float32 scalars loss, l1, nnz, dead_fraction, grad_norm, learning_rate,
      targets (unmasked), sparse_layers (how many layers took the sparse path, a mean over
      microbatches and devices), and nnz_per_layer (L,).
    """
    options = dataclasses.replace(options, count_neurons=True)
    objective = objective or language_model(config, loss, mesh)
    l1_coeff = 2e-5 if loss.l1_coeff is None else loss.l1_coeff

    def microbatch_loss(params: Params, frozen: Any, batch: Batch, tokens: Array, coeff: Array):
        # Everything over the whole batch's denominators, so that microbatches add up.
        weights = _mask(batch).astype(jnp.float32) / tokens
        main, terms, stats = objective.loss(params, frozen, batch, weights, options)
        all_tokens, layers = weights.size * loss.accumulate, max(len(config.ffn_layers), 1)
        l1 = jnp.sum(stats.l1) / (all_tokens * layers)
        nnz = jnp.sum(stats.nnz.astype(jnp.float32), axis=(1, 2)) / all_tokens
        parts: dict[str, Any] = {**terms, "main": main, "l1": l1, "nnz_per_layer": nnz}
        parts["neuron_nnz"] = stats.neuron_nnz
        parts["sparse_layers"] = jnp.sum(stats.sparse) / loss.accumulate
        return main + coeff * l1, parts

    def update(state: TrainState, batch: Batch, frozen: Any = None) -> tuple[TrainState, Metrics]:
        coeff = l1_coefficient(state.step, l1_coeff, loss.l1_start, loss.l1_ramp)
        tokens = jnp.maximum(jnp.sum(_mask(batch), dtype=jnp.float32), 1.0)
        grad = jax.grad(microbatch_loss, has_aux=True)
        if loss.accumulate == 1:
            grads, parts = grad(state.params, frozen, batch, tokens, coeff)
        else:
            # Strided rows: every microbatch keeps each device's own rows.
            stacked = jax.tree.map(
                lambda a: a.reshape(-1, loss.accumulate, a.shape[1]).swapaxes(0, 1), batch
            )
            first = jax.tree.map(lambda a: a[0], stacked)
            shapes = jax.eval_shape(grad, state.params, frozen, first, tokens, coeff)
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

            def add(total, micro):
                new = grad(state.params, frozen, micro, tokens, coeff)
                return jax.tree.map(jnp.add, total, new), None

            (grads, parts), _ = jax.lax.scan(add, zeros, stacked)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updates = jax.tree_util.tree_map_with_path(
            lambda path, u: u if objective.trains(path_string(path)) else jnp.zeros_like(u), updates
        )
        params: Any = optax.apply_updates(state.params, updates)
        neuron_nnz = parts.pop("neuron_nnz")
        dead = {i: count == 0 for i, count in zip(config.sparse_layers, neuron_nnz, strict=True)}
        if loss.revive_dead:
            key = jax.random.fold_in(jax.random.key(seed), state.step)
            params, opt_state = revive(config, params, opt_state, dead, loss.revive_dead, key)
        all_dead = jnp.concatenate([*dead.values(), jnp.zeros((0,), bool)])
        metrics = {
            "loss": parts.pop("main") + coeff * parts["l1"],
            **parts,
            "nnz": jnp.sum(parts["nnz_per_layer"]) / max(len(config.ffn_layers), 1),
            "dead_fraction": jnp.sum(all_dead, dtype=jnp.float32) / max(all_dead.size, 1),
            "grad_norm": optax.tree.norm(grads),
            "targets": jnp.sum(_mask(batch), dtype=jnp.float32),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    shardings = jax.tree.map(lambda s: s.sharding, state_template(config, optimizer, mesh))
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        update,
        in_shardings=(shardings, batch_sharding(mesh), *_frozen_shardings(objective)),
        out_shardings=(shardings, replicated),
        donate_argnums=0,
    )


def make_eval_step(
    config: ModelConfig,
    vocab_chunk: int,
    options: Options,
    mesh: Mesh,
    objective: Objective | None = None,
) -> Callable[..., Metrics]:
    """The jitted `(params, batch) -> sums`: ce_sum, tokens, nnz_sum (L,), over unmasked tokens.

    And "batches", which is 1, with "sparse_sum" (L,), 1 where the layer took the sparse path.
    An objective adds sums of its own, and its frozen arrays as a third argument if it has any.
    """

    def evaluate(params: Params, batch: Batch, frozen: Any = None) -> Metrics:
        out, mask = run_model(config, params, batch, options), _mask(batch)
        head = head_weight(config, params)
        ce = cross_entropy(out.hidden, head, batch["targets"], chunk=vocab_chunk)
        nnz = jnp.where(mask, out.stats.nnz, 0)
        further = objective.evaluate(params, frozen, batch, out, mask) if objective else {}
        return {
            **further,
            "ce_sum": jnp.sum(jnp.where(mask, ce, 0.0)),
            "tokens": jnp.sum(mask, dtype=jnp.float32),
            "nnz_sum": jnp.sum(nnz, axis=(1, 2), dtype=jnp.float32),
            "sparse_sum": out.stats.sparse,
            "batches": jnp.float32(1),
        }

    return jax.jit(evaluate, out_shardings=NamedSharding(mesh, PartitionSpec()))


def language_model(config: ModelConfig, loss: LossConfig, mesh: Mesh) -> LanguageModel:
    """The objective of plain training."""
    return LanguageModel(config, loss.vocab_chunk, mesh.shape["data"] * mesh.shape["fsdp"])


def _frozen_shardings(objective: Objective) -> tuple[Any, ...]:
    """The shardings of the step's argument for frozen arrays, if it has one."""
    if objective.frozen is None:
        return ()
    return (jax.tree.map(lambda leaf: leaf.sharding, objective.frozen),)


def _mask(batch: Batch) -> Array:
    return batch.get("loss_mask", jnp.ones(batch["targets"].shape, bool))
