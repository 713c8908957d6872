"""The training state: a pytree of step, parameters and optimiser state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from sparsejax.config import ModelConfig
from sparsejax.params import init_params
from sparsejax.sharding import tree_shardings
from sparsejax.types import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a run needs to go on, besides the data's position.

    Attributes:
      step: () int32, updates done.
      params: the model's parameters.
      opt_state: optax state; its moments have the parameters' paths.
    """

    step: jax.Array
    params: Params
    opt_state: Any


def new_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, seed: jax.Array | int
) -> TrainState:
    """Fresh parameters and optimiser state at step 0."""
    params = init_params(config, jax.random.key(seed))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def state_template(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """The state's shapes, dtypes and shardings on `mesh`, without allocating anything."""
    shapes = jax.eval_shape(lambda: new_state(config, optimizer, 0))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        tree_shardings(mesh, shapes),
    )


def sharded_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int
) -> TrainState:
    """A fresh state, each device making its own share; the values do not depend on the mesh."""
    template = state_template(config, optimizer, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, template)
    params = init_params(config, jax.random.key(seed), shardings.params)
    return state_from_params(params, optimizer, shardings)


def state_from_params(
    params: Params, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """A state at step 0 with these parameters; the optimiser's part is made where it belongs."""

    def rest(params: Params) -> tuple[jax.Array, Any]:
        return jnp.zeros((), jnp.int32), optimizer.init(params)

    placed = (shardings.step, shardings.opt_state)
    step, opt_state = jax.jit(rest, out_shardings=placed)(params)
    return TrainState(step, params, opt_state)
