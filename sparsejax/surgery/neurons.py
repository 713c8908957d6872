"""Single neurons: how much each contributes, and their order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.gated_ffn import reference
from pallas_kernels.gated_ffn.output import ACTIVATIONS
from sparsejax.checks import host_batches, model_config, numbers
from sparsejax.config import ModelConfig
from sparsejax.modules import Transformer
from sparsejax.sharding import gather_fsdp
from sparsejax.surgery import leaves
from sparsejax.surgery.common import (
    Layers,
    ffn_of,
    layer_indices,
    put_together,
    take_apart,
)
from sparsejax.types import Params


def permute_neurons(
    config: ModelConfig,
    params: Params,
    layer: int,
    permutation: Sequence[int] | np.ndarray | Array,
    *,
    donate: bool = False,
) -> tuple[ModelConfig, Params]:
    """Neuron n of the layer becomes the one that was `permutation[n]`; the function is unchanged.

    Rows of gate, up and down and entries of the gate bias move together. Only the order of the sum
    over neurons changes, so outputs agree to rounding.

    Args:
      config: the model.
      params: its parameters, as arrays, sharded arrays, tracers or `jax.ShapeDtypeStruct`s.
      layer: a layer with a feed-forward part.
      permutation: (F,) every index from 0 to F - 1 once.
      donate: free each old leaf as soon as its successor exists. The old tree is unusable then.

    Returns:
      (config, params).

    Raises:
      ValueError: an unknown layer, one without feed-forward part, or not a permutation.
    """
    name = "permute_neurons"
    (index,) = layer_indices(name, config, [layer])
    width = ffn_of(name, config, index).d_ff
    order = numbers(name, "permutation", permutation)
    if order.shape != (width,) or order.dtype.kind not in "iu":
        raise ValueError(
            f"{name}: permutation must hold layer {index}'s {width} neurons as integers, got "
            f"{order.dtype}{list(order.shape)}"
        )
    if (order < 0).any() or (order >= width).any():
        wrong = order[(order < 0) | (order >= width)][0]
        raise ValueError(f"{name}: permutation must hold 0 to {width - 1}, got {wrong}")
    counts = np.bincount(order, minlength=width)
    if (counts != 1).any():
        raise ValueError(
            f"{name}: permutation must hold every neuron once; {int(np.argmax(counts > 1))} comes "
            f"{counts.max()} times and {int(np.argmin(counts))} not at all"
        )
    parts = take_apart(config, params)
    donated = leaves.Donated(name, params, donate)
    layer_config, part = parts[index]
    parts[index] = layer_config, take_neurons(index, part, order, donated)
    return put_together(config, params, parts)


def take_neurons(layer: int, part: Params, order: np.ndarray, donated: leaves.Donated) -> Params:
    """A layer's parameters with the neurons `order` (indices, in that order) and no others."""
    ffn: dict[str, Any] = {}
    for name, leaf in part["ffn"].items():
        path = f"layer_{layer}/ffn/{name}"
        ffn[name] = leaves.run(_take, [leaf], [order.astype(np.int32)], path=path)
        donated.free([leaf], made=ffn[name])
    return part | {"ffn": ffn}


def channel_contribution(
    config: ModelConfig,
    params: Params,
    batches: Iterable[Any],
    layers: Layers | None = None,
) -> dict[int, np.ndarray]:
    """c_n = mean over tokens of |h_n| * ||down_n||_2: how far y moves when neuron n is dropped.

    h is what the down projection reads. Batches are seen one at a time and only sums are kept:
    per batch in float32, over batches in float64.

    Args:
      config: the model.
      params: its parameters.
      batches: token arrays (B, T), or dicts as a data loader gives them: "tokens" and, where
        present, "positions", "segment_ids" and "loss_mask" (positions that are False are left out).
      layers: the layers to score; None for all with a feed-forward part.

    Returns:
      {layer: (F,) float64}.

    Raises:
      ValueError: no tokens in `batches`, batches that are none, an unknown layer or one without
        feed-forward part, parameters that do not fit or are shapes alone, or contributions that are
        NaN or infinite.

    Source: "channel contribution" of Puzzle, arXiv 2411.19146.
    """
    return contributions_for("channel_contribution", config, params, batches, layers)


def contributions_for(
    name: str, config: ModelConfig, params: Params, batches: Iterable[Any], layers: Layers | None
) -> dict[int, np.ndarray]:
    """`channel_contribution`, whose errors name the function that a caller asked."""
    # Analyses stand on surgery.
    from sparsejax.analysis.steps import Walk, read_batches

    model_config(name, config)
    chosen = layer_indices(name, config, config.ffn_layers if layers is None else layers)
    for i in chosen:
        ffn_of(name, config, i)
    # Checks the parameters; the model is run in one piece.
    Walk(config, params)
    sums: dict[int, Any] = dict.fromkeys(chosen, 0.0)
    tokens = 0
    for batch in read_batches(name, host_batches(name, batches)):
        found = _absolute_sums(
            config, chosen, params, batch.tokens, batch.positions, batch.segment_ids, batch.mask
        )
        # Fetched at once: one batch in flight.
        sums = {i: sums[i] + np.asarray(found[i], np.float64) for i in chosen}
        tokens += batch.count
    down = {i: params[f"layer_{i}"]["ffn"]["down"] for i in chosen}
    norms = {i: np.asarray(_row_norms(down[i]), np.float64) for i in chosen}
    result = {i: sums[i] / tokens * norms[i] for i in chosen}
    for i, values in result.items():
        wrong = np.flatnonzero(~np.isfinite(values))
        if wrong.size:
            raise ValueError(
                f"{name}: contributions of {wrong.size} of layer {i}'s {values.size} neurons are "
                "not finite: ids outside the vocabulary (masked positions need valid ones too), or "
                "parameters that are not finite or overflow in the model's dtype"
            )
    return result


@functools.partial(jax.jit, static_argnums=(0, 1))
def _absolute_sums(
    config: ModelConfig,
    layers: tuple[int, ...],
    params: Params,
    tokens: Array,
    positions: Array | None,
    segment_ids: Array | None,
    mask: Array,
) -> dict[int, Array]:
    """Sum over tokens of |h| (F,), float32, per layer."""
    model: Any = Transformer(config)
    # What a feed-forward part reads is what its norm gives.
    _, captured = model.apply(
        {"params": params},
        tokens,
        positions,
        segment_ids,
        capture_intermediates=lambda module, _: module.name == "ffn_norm",
        mutable=["intermediates"],
    )
    sums = {}
    for i in layers:
        (x,) = captured["intermediates"][f"layer_{i}"]["ffn_norm"]["__call__"]
        ffn = ffn_of("channel_contribution", config, i)
        weights = {
            name: gather_fsdp(leaf.astype(config.dtype), f"layer_{i}/ffn/{name}")
            for name, leaf in params[f"layer_{i}"]["ffn"].items()
        }
        pre, up = reference.pre_activations(
            x, weights.get("gate"), weights["up"], weights.get("gate_bias")
        )
        h = ACTIVATIONS[ffn.activation](pre.astype(jnp.float32))
        h = h if up is None else h * up.astype(jnp.float32)
        sums[i] = jnp.sum(jnp.where(mask[..., None], jnp.abs(h), 0.0), axis=(0, 1))
    return sums


@jax.jit
def _row_norms(down: Array) -> Array:
    return jnp.linalg.norm(down.astype(jnp.float32), axis=1)


def _take(sources: tuple[Array], operands: tuple[Array], *, static: tuple[()]) -> Array:
    return jnp.take(sources[0], operands[0], axis=0)
