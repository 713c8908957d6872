"""Neurons that fired on no token of a step, and bringing them back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from sparsejax.config import ModelConfig
from sparsejax.training.optimizer import zero_rows
from sparsejax.types import Params


def revive(
    config: ModelConfig,
    params: Params,
    opt_state: Any,
    dead: dict[int, Array],
    mix: float,
    key: Array,
) -> tuple[Params, Any]:
    """gate row <- (1 - mix) * row + mix * N(0, init_std^2), for dead neurons only.

    The row that decides whether a neuron fires is its gate row (its up row in a layer that is not
    gated). The optimiser's moments of exactly those rows are set to zero; everything else keeps
    its bits. Layers without a dead neuron cost one predicate.

    Args:
      config: the model.
      params: its parameters.
      opt_state: the optimiser state, whose moments end in the parameters' paths.
      dead: layer index -> (F,) bool, True where the neuron fired on no token.
      mix: share of the fresh draw, 0.1 in the source.
      key: PRNG key of this step.

    Returns:
      (params, opt_state).

    Source: arXiv 2603.23198, targeted re-initialisation of dead neurons.
    """
    params = dict(params)
    rows_by_path = {}
    for i, rows in dead.items():
        ffn = config.layers[i].ffn
        assert ffn is not None
        name = "gate" if ffn.gated else "up"
        layer = dict(params[f"layer_{i}"])
        old = layer["ffn"][name]

        def mixed(old: Array, rows: Array, layer_key: Array) -> Array:
            fresh = config.init_std * jax.random.normal(layer_key, old.shape, jnp.float32)
            new = (1 - mix) * old.astype(jnp.float32) + mix * fresh
            return jnp.where(rows[:, None], new.astype(old.dtype), old)

        # Drawing F x D normals is the cost: skip it where nothing is dead.
        new = jax.lax.cond(
            jnp.any(rows), mixed, lambda old, rows, key: old, old, rows, jax.random.fold_in(key, i)
        )
        params[f"layer_{i}"] = layer | {"ffn": layer["ffn"] | {name: new}}
        rows_by_path[f"layer_{i}/ffn/{name}"] = rows
    return params, zero_rows(opt_state, rows_by_path)
