"""The model as functions of `(config, params, tokens)`; no Module needed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from sparsejax.attention import Cache
from sparsejax.checks import host_ids, host_indices, model_config
from sparsejax.config import ModelConfig
from sparsejax.modules import Options, Transformer
from sparsejax.params import check_params
from sparsejax.sharding import BATCH_AXES, constrain, gather_fsdp
from sparsejax.types import Hidden, Logits, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FFNStats:
    """Statistics of the feed-forward layers of one forward pass; axis L is `config.ffn_layers`.

    Attributes:
      l1: (L, B, T) float32, sum over neurons of |h|; differentiable.
      nnz: (L, B, T) int32, active neurons.
      sparse: (L,) float32, 1 where the layer took the sparse path and 0 where the dense one; on a
        mesh the share of devices that took the sparse path.
      neuron_nnz: one (F,) int32 per layer of `config.sparse_layers`, the tokens each neuron fires
        on; empty unless counted.
    """

    l1: Array
    nnz: Array
    sparse: Array
    neuron_nnz: tuple[Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """Result of `forward`.

    Attributes:
      hidden: (B, T, D), after the final norm; multiply with `head_weight` for logits.
      stats: statistics of the feed-forward layers.
      cache: the updated key/value cache, or None.
      hidden_states: with `Options.capture_hidden`, the residual stream (B, T, D) before the first
        layer and after each one, `num_layers + 1` arrays; empty otherwise.
    """

    hidden: Hidden
    stats: FFNStats
    cache: Cache | None
    hidden_states: tuple[Hidden, ...] = ()


def forward(
    config: ModelConfig,
    params: Params,
    tokens: Array,
    *,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    cache: Cache | None = None,
    options: Options = Options(),
) -> ModelOutput:
    """Runs the layers: tokens (B, T) int -> hidden states (B, T, D) and FFN statistics.

    Args:
      config: the model.
      params: its parameters (`check_params` tells whether they fit).
      tokens: (B, T) ids in [0, `config.vocab_size`); any other gives NaN, never another row.
      positions: (B, T) rotary positions; None means 0..T-1 in every row.
      segment_ids: (B, T) document of each token; attention stays inside a document.
      cache: key/value cache to read and extend (with `positions` as slots). Where positions is None
        it needs T slots or more, and is written by a plain copy in the place of a scatter.
      options: engine, remat, counting; none of them changes the result.

    Returns:
      ModelOutput.

    Raises:
      ValueError: parameters that do not fit the config (missing, extra or misshapen leaves), tokens
        that are not integers (B, T), arguments of another shape, a cache too small for them, or
        engines (`options.implementation`) for another number of layers.
    """
    check_params(config, params)
    tokens, positions, segment_ids = _from_host(tokens, positions, segment_ids)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"forward: tokens must be integers (B, T), got {tokens.dtype}{list(tokens.shape)}"
            + ("; for one sequence pass tokens[None]" if tokens.ndim == 1 else "")
        )
    for name, array in {"positions": positions, "segment_ids": segment_ids}.items():
        if array is not None and array.shape != tokens.shape:
            raise ValueError(
                f"forward: {name} must have tokens' shape {list(tokens.shape)}, "
                f"got {list(array.shape)}"
            )
    if cache is not None and segment_ids is not None:
        raise ValueError("forward: segment_ids and cache cannot be combined; pass one of them")
    run: Any = Transformer(config, options).apply
    mutable = ["residual"] if options.capture_hidden else []
    result, sown = run({"params": params}, tokens, positions, segment_ids, cache, mutable=mutable)
    hidden, outputs, cache = result
    shape = (0, *tokens.shape)
    stats = FFNStats(
        l1=jnp.stack([o.l1 for o in outputs]) if outputs else jnp.zeros(shape, jnp.float32),
        nnz=jnp.stack([o.nnz for o in outputs]) if outputs else jnp.zeros(shape, jnp.int32),
        sparse=jnp.stack([o.sparse for o in outputs]) if outputs else jnp.zeros((0,), jnp.float32),
        neuron_nnz=tuple(o.neuron_nnz for o in outputs if o.neuron_nnz is not None),
    )
    states = sown["residual"]["stream"] if options.capture_hidden else ()
    return ModelOutput(hidden=hidden, stats=stats, cache=cache, hidden_states=states)


def head_weight(config: ModelConfig, params: Params) -> Array:
    """The output head as (V, D) in compute dtype: the embedding when tied, else lm_head^T."""
    if config.tie_embeddings:
        weight = params["embed"]["embedding"].astype(config.dtype)
        return gather_fsdp(weight, "embed/embedding")
    return gather_fsdp(params["lm_head"]["kernel"].astype(config.dtype), "lm_head/kernel").T


def logits(config: ModelConfig, params: Params, hidden: Hidden) -> Logits:
    """hidden (B, T, D) times head (V, D)^T, float32 (B, T, V)."""
    weight = head_weight(config, params)
    out = jnp.einsum("btd,vd->btv", hidden, weight, preferred_element_type=jnp.float32)
    return constrain(out, BATCH_AXES, None, "tensor")


def apply(
    config: ModelConfig,
    params: Params,
    tokens: Array,
    *,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    options: Options = Options(),
) -> Logits:
    """Logits (B, T, V) float32 of tokens (B, T): the whole model, compiled once per shape.

    Args and errors as `forward`. For training use `sparsejax.losses`, which never holds (B, T, V).
    """
    model_config("apply", config)
    # Before they become arguments of a compiled function, which narrows them.
    tokens, positions, segment_ids = _from_host(tokens, positions, segment_ids)
    return _apply(config, params, tokens, positions, segment_ids, options)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _apply(
    config: ModelConfig,
    params: Params,
    tokens: Array,
    positions: Array | None,
    segment_ids: Array | None,
    options: Options,
) -> Logits:
    out = forward(
        config, params, tokens, positions=positions, segment_ids=segment_ids, options=options
    )
    return logits(config, params, out.hidden)


def _from_host(tokens: Any, positions: Any, segment_ids: Any) -> tuple[Any, Any, Any]:
    """Arrays of NumPy with 64-bit integers as 32 bits hold them; everything else unchanged."""
    return (
        host_ids(tokens),
        host_indices("forward", "positions", positions),
        host_indices("forward", "segment_ids", segment_ids),
    )


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Model FLOPs of one training token (forward + backward), for model FLOPs utilisation.

    6 per matmul parameter used (a tied head counts once as head; the embedding lookup is free)
    plus causal attention, 6 * T * H * K per layer (half of the full square; forward 2, backward
    4). Recomputation and sparsity are not counted: it is what the dense model asks for.
    """
    total = 6.0 * config.vocab_size * config.d_model
    for layer in config.layers:
        if layer.attention is not None:
            a = layer.attention
            heads = 2 * a.num_heads + 2 * a.num_kv_heads
            total += 6.0 * config.d_model * heads * a.head_dim
            total += 6.0 * seq_len * a.num_heads * a.head_dim
        if layer.ffn is not None:
            total += 6.0 * config.d_model * layer.ffn.d_ff * (3 if layer.ffn.gated else 2)
    return total


__all__ = [
    "FFNStats",
    "ModelOutput",
    "Options",
    "apply",
    "flops_per_token",
    "forward",
    "head_weight",
    "logits",
]
