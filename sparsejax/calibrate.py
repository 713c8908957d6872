"""Gate biases that give a model of random weights a chosen activity, layer by layer.

A trained sparse model fires on few neurons because of its weights; a benchmark needs the same
activity without the training. A neuron's bias moves its pre-activations, so the bias whose negative
is a quantile of them, on the layer's real input, sets how often it fires.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sparsejax.analysis.steps import Stream, Walk, add, on_mesh, read_batches
from sparsejax.analysis.tokenwise import not_finite
from sparsejax.checks import host_batches
from sparsejax.config import ModelConfig
from sparsejax.modules import RMSNorm
from sparsejax.params import path_string
from sparsejax.sharding import gather_fsdp
from sparsejax.types import Params

_NAME = "calibrate_gate_bias"
_SAMPLE = 4096  # tokens a quantile is taken over

MEASURED = (156.3, 6.9, 2.1, 4.0, 4.0, 5.8, 6.9, 12.1, 11.7, 14.7, 23.0, 46.8)
"""Active neurons per token in each layer of a trained model: 12 layers, d_ff 2816, unseen text."""
_MEASURED_D_FF = 2816


def measured_profile(widths: Sequence[int]) -> list[float]:
    """Active neurons per layer as in `MEASURED`, for layers of these d_ff.

    Densities are kept; the first layer, which is far denser than the others, stays one layer, and
    the others are interpolated by relative depth.
    """
    rest, source = np.arange(len(widths) - 1), np.arange(1, len(MEASURED))
    depth = 1 + rest * (len(source) - 1) / max(len(rest) - 1, 1)
    values = [MEASURED[0], *np.interp(depth, source, MEASURED[1:])]
    return [float(v) * f / _MEASURED_D_FF for v, f in zip(values, widths, strict=True)]


def with_gate_bias(config: ModelConfig) -> ModelConfig:
    """The model with a gate bias in every ReLU layer."""
    layers = tuple(
        dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, gate_bias=True))
        if layer.ffn is not None and layer.ffn.activation == "relu"
        else layer
        for layer in config.layers
    )
    return config.replace(layers=layers)


def without_gate_bias(tree: Any) -> Any:
    """`tree` (parameters, or a state that holds such trees) with its gate biases left out."""
    if isinstance(tree, dict):
        return {k: without_gate_bias(v) for k, v in tree.items() if k != "gate_bias"}
    return jax.tree.map(
        lambda node: without_gate_bias(node) if isinstance(node, dict) else node,
        tree,
        is_leaf=lambda node: isinstance(node, dict),
    )


def restore_gate_bias(tree: Any, old: Any) -> Any:
    """The inverse of `without_gate_bias`: gate biases come from `old`, other leaves from `tree`."""
    leaves = {path_string(path): leaf for path, leaf in _flat(tree)}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaves.get(path_string(path), leaf), old
    )


def _flat(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def damp_outputs(params: Params, factor: float = 1 / 64) -> Params:
    """`params` with every projection into the residual stream (o, down) times `factor`.

    In a model of random weights the layers' outputs have a large part common to all tokens, which
    changes from text to text: biases set on one batch give a deep layer 10 times the activity on
    the next. Damped, every layer reads little but the token's own embedding, and activity set on
    some tokens holds for all. Costs do not change.
    """

    def damp(path: Any, leaf: Array) -> Array:
        outward = path_string(path).endswith(("attn/o", "ffn/down"))
        return leaf * jnp.asarray(factor, leaf.dtype) if outward else leaf

    return jax.tree_util.tree_map_with_path(damp, params)


def calibrate_gate_bias(
    config: ModelConfig,
    params: Params,
    tokens: Any,
    nnz: Sequence[float],
    *,
    pattern: str = "uniform",
    seed: int = 0,
) -> Params:
    """Parameters whose ReLU layers have `nnz[l]` active neurons per token, a mean over `tokens`.

    Layers are set one after the other, each on the input that the layers before it, already set,
    give it. Quantiles are taken over up to 4,096 tokens, in the model's compute dtype; where a
    neuron cannot fire on just the tokens it should (fractions, equal values), it draws a threshold
    from two so that the mean is met.

    Args:
      config: the model; all its ReLU layers have a gate bias (`with_gate_bias`).
      params: its parameters; they are not changed.
      tokens: (B, T) ids to calibrate on.
      nnz: one number per layer of `config.sparse_layers`, from 0 to its d_ff.
      pattern: "uniform", all neurons of a layer fire equally often, or "powerlaw", neuron r fires
        in proportion to 1 / (1 + r), at most on 90 % of the tokens.
      seed: which neurons are the hot ones, and the draws.

    Returns:
      The new parameters; all leaves but the biases are shared with the old ones.

    Raises:
      ValueError: a ReLU layer without gate bias, a wrong number of targets or one out of range, an
        unknown pattern, or numbers that are not finite (ids outside the vocabulary).
    """
    _check(config, nnz, pattern)
    params = {k: dict(v) if k.startswith("layer_") else v for k, v in params.items()}
    walk = Walk(config, params)
    core = config.replace(layers=())
    with on_mesh(params):
        (batch,) = read_batches(_NAME, host_batches(_NAME, [tokens]))
        stream = walk.embed(batch)
        for i in range(config.num_layers):
            read = walk.read(i, stream)
            attention = walk.part("attention", i, read, batch)
            x = add(read, attention)
            layer, own = walk.layer(i)
            if layer.ffn is not None and layer.ffn.activation == "relu":
                wrong = int(not_finite(x, np.ones_like(batch.mask)))
                if wrong:
                    raise ValueError(
                        f"{_NAME}: what the feed-forward part of layer {i} reads is not finite on "
                        f"{wrong} tokens: ids outside the vocabulary, or parameters that are not "
                        "finite"
                    )
                target = nnz[config.sparse_layers.index(i)]
                rates = firing_rates(layer.ffn.d_ff, target, pattern, seed + i)
                rows = own["ffn"]["gate" if layer.ffn.gated else "up"]
                key = jax.random.fold_in(jax.random.key(seed), i)
                old = own["ffn"]["gate_bias"]
                bias = _bias(core, own["ffn_norm"], rows, x, jnp.asarray(rates), key)
                bias = jax.device_put(bias.astype(old.dtype), old.sharding)
                params[f"layer_{i}"]["ffn"] = own["ffn"] | {"gate_bias": bias}
            delta = add(attention, walk.part("ffn", i, x, batch))
            stream = Stream(add(stream.x, delta), read)
    return params


def firing_rates(features: int, nnz: float, pattern: str, seed: int = 0) -> np.ndarray:
    """(F,) float32: the share of tokens each neuron is to fire on; they sum to `nnz`."""
    if pattern == "uniform":
        return np.full(features, nnz / features, np.float32)
    rates = 1.0 / np.arange(1, features + 1)
    if nnz < 0.9 * features:
        for _ in range(50):
            rates = np.minimum(rates * nnz / rates.sum(), 0.9)
    else:
        rates = np.full(features, nnz / features)
    return np.random.default_rng(seed).permutation(rates).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _bias(
    core: ModelConfig, norm: Params, rows: Array, x: Array, rates: Array, key: Array
) -> Array:
    """(F,) float32: minus a threshold per neuron, a quantile of its own pre-activations."""
    module: Any = RMSNorm(core)
    normed = module.apply({"params": norm}, x).reshape(-1, x.shape[-1])
    stride = max(1, normed.shape[0] // _SAMPLE) | 1  # odd: every position of a sequence is seen
    sample = normed[::stride]
    rows = gather_fsdp(rows.astype(core.dtype), "ffn/gate")
    pre = jnp.einsum("md,fd->mf", sample, rows).astype(jnp.float32)
    wanted = rates * pre.shape[0]
    # Ascending: with the threshold at place M - 1 - k at most k values lie above it.
    place = jnp.clip(pre.shape[0] - 1 - jnp.floor(wanted).astype(jnp.int32), 0)
    value = jnp.take_along_axis(jnp.sort(pre, axis=0), place[None], axis=0)
    below = jnp.max(jnp.where(pre < value, pre, -jnp.inf), axis=0)
    above = jnp.min(jnp.where(pre > value, pre, jnp.inf), axis=0)
    value = value[0]
    # Always and never have no value on the other side: well under the least, well over the most.
    far = 2 * jnp.abs(value) + 2
    below = jnp.where(jnp.isfinite(below), below, value - far)
    above = jnp.where(jnp.isfinite(above), above, value + far)
    more, fewer = (jnp.sum(m, axis=0, dtype=jnp.float32) for m in (pre >= value, pre > value))
    drawn = jax.random.uniform(key, value.shape) < (wanted - fewer) / (more - fewer)
    return -_between(
        jnp.where(drawn, below, value), jnp.where(drawn, value, above), jnp.dtype(core.dtype)
    )


def _between(low: Array, high: Array, dtype: Any) -> Array:
    """A threshold that `dtype` holds and that high, but not low, exceeds; the middle if it can be.

    In the middle, another order of summation, which moves low or high a little, changes no count.
    """
    middle = ((low + high) / 2).astype(dtype).astype(jnp.float32)
    return jnp.where((middle >= low) & (middle < high), middle, low)


def _check(config: ModelConfig, nnz: Sequence[float], pattern: str) -> None:
    if pattern not in ("uniform", "powerlaw"):
        raise ValueError(f"{_NAME}: pattern must be 'uniform' or 'powerlaw', got {pattern!r}")
    if len(nnz) != len(config.sparse_layers):
        raise ValueError(
            f"{_NAME}: nnz must hold one number for each of the {len(config.sparse_layers)} ReLU "
            f"layers, got {len(nnz)}"
        )
    for i, target in zip(config.sparse_layers, nnz, strict=True):
        ffn = config.layers[i].ffn
        assert ffn is not None
        if not ffn.gate_bias:
            raise ValueError(f"{_NAME}: layer {i} has no gate bias; use with_gate_bias(config)")
        if not 0 <= target <= ffn.d_ff:
            raise ValueError(f"{_NAME}: nnz of layer {i} must be in [0, {ffn.d_ff}], got {target}")
