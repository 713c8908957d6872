"""Dense activations replaced by ReLU, which makes exact zeros: where sparse training can start."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.checks import model_config, real_number
from sparsejax.config import ModelConfig
from sparsejax.surgery import leaves
from sparsejax.surgery.common import Layers, ffn_of, layer_indices, put_together, take_apart
from sparsejax.types import Params


@dataclasses.dataclass(frozen=True)
class RelufiedLayer:
    """What `relufy` did to one layer.

    Attributes:
      layer: its index.
      before: the activation that was replaced.
      threshold: t in relu(z - t).
      largest_change: the largest |before(z) - relu(z - t)| over all z: how far the activation of a
        neuron can be off, before it is multiplied with `up`. 0.2785 for SiLU and t = 0 (at
        z = -1.278), 0.17 for GELU.
    """

    layer: int
    before: str
    threshold: float
    largest_change: float


@dataclasses.dataclass(frozen=True)
class ReluReport:
    """What `relufy` did, a `RelufiedLayer` for each layer in the order asked for."""

    layers: tuple[RelufiedLayer, ...]


def relufy(
    config: ModelConfig,
    params: Params,
    layers: Layers | None = None,
    *,
    threshold: float | Mapping[int, float] = 0.0,
) -> tuple[ModelConfig, Params, ReluReport]:
    """h = act(z) * up becomes h = relu(z - t) * up, with z = x gate^T + gate_bias.

    An approximation, and a starting point for training: SiLU and GELU let small negative values
    through, which ReLU cuts, and training with an L1 term makes good what that loses. Only a layer
    whose pre-activations are all 0 or large keeps its function. A positive threshold silences more
    neurons from the start, at the price of an offset of t in those that fire. It becomes part of
    the gate bias (gate_bias - t), so t = 0 adds no parameters.

    Args:
      config: the model.
      params: its parameters, as arrays, sharded arrays, tracers or `jax.ShapeDtypeStruct`s.
      layers: one index or several, each of a layer with another activation than ReLU; None takes
        all of those.
      threshold: t, for all the layers or as {layer: t}.

    Returns:
      (config, params, report).

    Raises:
      ValueError: an unknown layer, one without feed-forward part or with ReLU already, none at all,
        or a threshold that is missing or not finite.

    Source: arXiv 2603.23198 names continued training of dense models with L1 as future work.
    """
    name = "relufy"
    model_config(name, config)
    dense = [
        i for i, layer in enumerate(config.layers) if layer.ffn and layer.ffn.activation != "relu"
    ]
    if layers is None and not dense:
        raise ValueError(f"{name}: every feed-forward layer of this model has ReLU already")
    chosen = layer_indices(name, config, dense if layers is None else layers)
    if not chosen:
        raise ValueError(
            f"{name}: layers is empty; name one layer or more, or None for all of {dense}"
        )
    thresholds = _thresholds(name, threshold, chosen)
    parts = take_apart(config, params)
    report = []
    for i in chosen:
        ffn, (layer, part) = ffn_of(name, config, i), parts[i]
        if ffn.activation == "relu":
            raise ValueError(
                f"{name}: layer {i} has ReLU already; layers with another activation: {dense}"
            )
        t = thresholds[i]
        if t:
            part["ffn"] = part["ffn"] | {"gate_bias": _shifted(i, part["ffn"], t)}
        bias = ffn.gate_bias or bool(t)
        ffn_now = dataclasses.replace(ffn, activation="relu", gate_bias=bias)
        parts[i] = dataclasses.replace(layer, ffn=ffn_now), part
        change = largest_change(ffn.activation, t)
        report.append(RelufiedLayer(i, ffn.activation, t, change))
    return *put_together(config, params, parts), ReluReport(tuple(report))


def largest_change(activation: str, threshold: float) -> float:
    """max over z of |act(z) - relu(z - t)|, for SiLU and GELU (in its tanh form)."""
    # Beyond |z| = 40 both activations are z or 0 to the last bit, and the difference is t or 0.
    z = np.linspace(-40.0, 40.0, 800_001)
    if activation == "silu":
        value = z / (1 + np.exp(-z))
    else:
        value = 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return float(np.abs(value - np.maximum(z - threshold, 0)).max())


def _thresholds(
    name: str, threshold: float | Mapping[int, float], chosen: tuple[int, ...]
) -> dict[int, float]:
    if isinstance(threshold, Mapping):
        if set(threshold) != set(chosen):
            raise ValueError(
                f"{name}: threshold must hold an entry for each of layers {list(chosen)}, got "
                f"{sorted(threshold)}"
            )
        values = {i: threshold[i] for i in chosen}
    else:
        values = dict.fromkeys(chosen, threshold)
    found: dict[int, float] = {}
    for i, value in values.items():
        argument, expected = f"threshold for layer {i}", "a finite number"
        found[i] = real_number(name, argument, value, expected)
        if not math.isfinite(found[i]):
            raise ValueError(f"{name}: {argument} must be {expected}, got {value!r}")
    return found


def _shifted(layer: int, ffn: Params, threshold: float) -> Any:
    """The gate bias minus the threshold, made where there was none; split as the neurons are."""
    path = f"layer_{layer}/ffn"
    if "gate_bias" in ffn:
        static = (threshold,)
        return leaves.run(_shift, [ffn["gate_bias"]], static=static, path=f"{path}/gate_bias")
    up = ffn["up"]
    found = leaves.sharding_of(up, f"{path}/up")
    sharding = None if found is None else NamedSharding(found.mesh, P(*found.spec[:1]))
    shape, dtype = up.shape[:1], up.dtype
    if leaves.is_shape(up):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    if isinstance(up, Tracer):
        return jnp.full(shape, -threshold, dtype)
    where = up.sharding if sharding is None else sharding
    return jax.device_put(jnp.full(shape, -threshold, dtype), where)


def _shift(sources: tuple[jax.Array], operands: tuple[()], *, static: tuple[float]) -> jax.Array:
    (bias,), (threshold,) = sources, static
    return (bias.astype(jnp.float32) - threshold).astype(bias.dtype)
