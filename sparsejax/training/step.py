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

from sparsejax import fused_loss
from sparsejax.config import ModelConfig
from sparsejax.losses import DEFAULT_CHUNK, cross_entropy, l1_coefficient
from sparsejax.model import ModelOutput, Options, forward, head_weight
from sparsejax.sharding import batch_sharding
from sparsejax.training.neurons import revive
from sparsejax.training.state import TrainState, state_template
from sparsejax.types import Params

Batch = dict[str, Array]
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
) -> Any:
    """The jitted update `(state, batch) -> (state, metrics)`; the state's buffers are donated.

    Args:
      config: the model.
      optimizer: from `make_optimizer`.
      schedule: its learning rate, for the metrics.
      loss: terms of the loss and gradient accumulation.
      options: how the forward pass runs.
      mesh: where state (by the sharding rules) and batch (rows over data and fsdp) live.
      seed: seeds the draws that revive dead neurons.

    Returns:
      The function. Its batch is {"tokens", "targets"} (B, T) int32 and optionally "segment_ids",
      "positions" and "loss_mask" (B, T). Its metrics are replicated: float32 scalars loss, ce, l1,
      nnz, dead_fraction, grad_norm, learning_rate, targets (unmasked), sparse_layers (how many
      layers took the sparse path, a mean over microbatches and devices), and nnz_per_layer (L,).
    """
    options = dataclasses.replace(options, count_neurons=True)
    batch_ways = mesh.shape["data"] * mesh.shape["fsdp"]
    l1_coeff = 2e-5 if loss.l1_coeff is None else loss.l1_coeff

    def microbatch_loss(params: Params, batch: Batch, tokens: Array, coeff: Array):
        out = _run(config, params, batch, options)
        # Everything over the whole batch's denominators, so that microbatches add up.
        weights = _mask(batch).astype(jnp.float32) / tokens
        head, targets = head_weight(config, params), batch["targets"]
        rows, length = targets.shape[0] // batch_ways, targets.shape[1]
        if fused_loss.pays(rows, length, config.vocab_size, loss.vocab_chunk):
            ce = fused_loss.weighted_cross_entropy(
                out.hidden, head, targets, weights, chunk=loss.vocab_chunk
            )
        else:
            per_token = cross_entropy(out.hidden, head, targets, chunk=loss.vocab_chunk)
            ce = jnp.sum(jnp.where(weights > 0, per_token * weights, 0.0))
        all_tokens, layers = targets.size * loss.accumulate, max(len(config.ffn_layers), 1)
        l1 = jnp.sum(out.stats.l1) / (all_tokens * layers)
        nnz = jnp.sum(out.stats.nnz.astype(jnp.float32), axis=(1, 2)) / all_tokens
        parts = {"ce": ce, "l1": l1, "nnz_per_layer": nnz, "neuron_nnz": out.stats.neuron_nnz}
        parts["sparse_layers"] = jnp.sum(out.stats.sparse) / loss.accumulate
        return ce + coeff * l1, parts

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        coeff = l1_coefficient(state.step, l1_coeff, loss.l1_start, loss.l1_ramp)
        tokens = jnp.maximum(jnp.sum(_mask(batch), dtype=jnp.float32), 1.0)
        grad = jax.grad(microbatch_loss, has_aux=True)
        if loss.accumulate == 1:
            grads, parts = grad(state.params, batch, tokens, coeff)
        else:
            # Strided rows: every microbatch keeps each device's own rows.
            stacked = jax.tree.map(
                lambda a: a.reshape(-1, loss.accumulate, a.shape[1]).swapaxes(0, 1), batch
            )
            shapes = jax.eval_shape(
                grad, state.params, jax.tree.map(lambda a: a[0], stacked), tokens, coeff
            )
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

            def add(total, micro):
                return jax.tree.map(jnp.add, total, grad(state.params, micro, tokens, coeff)), None

            (grads, parts), _ = jax.lax.scan(add, zeros, stacked)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        neuron_nnz = parts.pop("neuron_nnz")
        dead = {i: count == 0 for i, count in zip(config.sparse_layers, neuron_nnz, strict=True)}
        if loss.revive_dead:
            key = jax.random.fold_in(jax.random.key(seed), state.step)
            params, opt_state = revive(config, params, opt_state, dead, loss.revive_dead, key)
        all_dead = jnp.concatenate([*dead.values(), jnp.zeros((0,), bool)])
        metrics = {
            "loss": parts["ce"] + coeff * parts["l1"],
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
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, replicated),
        donate_argnums=0,
    )


def make_eval_step(
    config: ModelConfig, vocab_chunk: int, options: Options, mesh: Mesh
) -> Callable[[Params, Batch], Metrics]:
    """The jitted `(params, batch) -> sums`: ce_sum, tokens, nnz_sum (L,), over unmasked tokens.

    And "batches", which is 1, with "sparse_sum" (L,), 1 where the layer took the sparse path.
    """

    def evaluate(params: Params, batch: Batch) -> Metrics:
        out, mask = _run(config, params, batch, options), _mask(batch)
        head = head_weight(config, params)
        ce = cross_entropy(out.hidden, head, batch["targets"], chunk=vocab_chunk)
        nnz = jnp.where(mask, out.stats.nnz, 0)
        return {
            "ce_sum": jnp.sum(jnp.where(mask, ce, 0.0)),
            "tokens": jnp.sum(mask, dtype=jnp.float32),
            "nnz_sum": jnp.sum(nnz, axis=(1, 2), dtype=jnp.float32),
            "sparse_sum": out.stats.sparse,
            "batches": jnp.float32(1),
        }

    return jax.jit(evaluate, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _run(config: ModelConfig, params: Params, batch: Batch, options: Options) -> ModelOutput:
    return forward(
        config,
        params,
        batch["tokens"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        options=options,
    )


def _mask(batch: Batch) -> Array:
    return batch.get("loss_mask", jnp.ones(batch["targets"].shape, bool))
