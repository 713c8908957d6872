"""The two compiled programs of generation: prefill of a batch of prompts, and decode steps.

Prompts are padded on the right, and slot s of a row's cache holds its position s: a row writes its
new tokens over the padding, which no query ever sees. So a row computes what it would alone.

Both programs choose tokens on the device. One decode call runs up to `MAX_STEPS_PER_CALL` steps,
stops early when every row has ended, and updates the cache in place (its buffers are donated).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from sparsejax import model
from sparsejax.attention import Cache, init_cache
from sparsejax.config import ModelConfig
from sparsejax.modules import Options
from sparsejax.params import flatten, path_string
from sparsejax.sampling import Sampling, sample
from sparsejax.sharding import BATCH_AXES, constrain
from sparsejax.types import Params

ENDED = -1
"""In place of an id: the row has ended before this step."""

MAX_STEPS_PER_CALL = 32

_MATRICES = {"embedding", "q", "k", "v", "o", "gate", "up", "down", "kernel"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What a decode step reads and writes.

    Attributes:
      cache: keys and values, only of layers with attention.
      token: (B,) int32, the id to feed next.
      position: (B,) int32, its position.
      ended: (B,) bool.
      step: () int32, new tokens so far.
    """

    cache: Cache
    token: Array
    position: Array
    ended: Array
    step: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chooser:
    """How the next token is chosen and when a row ends.

    Attributes:
      sampling: see `sparsejax.sampling`.
      keys: (B,) PRNG keys of the rows; None when greedy.
      eos_id: (E,) int32, the ids that end a row; negative for none.
    """

    sampling: Sampling
    keys: Array | None
    eos_id: Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The programs for one model and mesh.

    Attributes:
      config: the model.
      options: engine of the feed-forward layers.
      mesh: rows over data and fsdp, heads, neurons and vocabulary over tensor; None for none.
    """

    config: ModelConfig
    options: Options = Options()
    mesh: Mesh | None = None

    def cast(self, params: Params) -> Params:
        """See `compute_params`."""
        with self._mesh():
            return compute_params(self.config, params)

    def prefill(
        self,
        params: Params,
        tokens: Any,
        lengths: Any,
        ended: Any,
        chooser: Chooser,
        slots: int,
        cache_dtype: str | None,
    ) -> tuple[State, Array]:
        """Reads prompts: tokens (B, T) of which row b has lengths[b] >= 1; chooses the first ids.

        Returns:
          The state, with caches of `slots` slots in `cache_dtype`, and the new ids (B, 1).
        """
        options = dataclasses.replace(self.options, fresh_cache=True)
        static = (self.config, options, slots, cache_dtype)
        with self._mesh():
            return _prefill(*static, params, tokens, lengths, ended, chooser)

    def decode(
        self, params: Params, state: State, chooser: Chooser, steps: int
    ) -> tuple[State, Array]:
        """Runs up to `steps` steps; `state` is donated.

        Returns:
          The state and the new ids (B, MAX_STEPS_PER_CALL), `ENDED` where there are none.
        """
        options = dataclasses.replace(self.options, fresh_cache=False)
        with self._mesh():
            return _decode(self.config, options, params, state, chooser, np.int32(steps))

    def _mesh(self) -> Any:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def compute_params(config: ModelConfig, params: Params) -> Params:
    """`params` with the matrices in `config.dtype`: the cast a forward pass makes, made once.

    Decoding reads every parameter per step, so without it a bfloat16 model over float32 parameters
    moves several times the bytes. Norms and biases, which a forward pass may read in float32, stay
    as they are. For inference only: training needs the full precision.
    """
    matrices = [leaf for path, leaf in flatten(params).items() if _is_matrix(path)]
    if all(leaf.dtype == config.dtype for leaf in matrices):
        return params
    return _cast(config.dtype, params)


def _is_matrix(path: str) -> bool:
    return path.rsplit("/", 1)[-1] in _MATRICES


def _prefill_step(config, options, slots, cache_dtype, params, tokens, lengths, ended, chooser):
    cache = _placed(init_cache(config, tokens.shape[0], slots, cache_dtype))
    out = model.forward(config, params, tokens, cache=cache, options=options)
    # Only each prompt's last position goes through the head: (B, 1, V), never (B, T, V).
    hidden = jnp.take_along_axis(out.hidden, (lengths - 1)[:, None, None], axis=1)
    # `_advance` replaces the token, and moves the position to that of the first new token.
    state = State(out.cache or {}, jnp.zeros_like(lengths), lengths - 1, ended, jnp.int32(0))
    state, new = _advance(config, params, state, hidden, chooser)
    return state, constrain(new[:, None], None, None)


def _decode_steps(config, options, params, state, chooser, steps):
    def step(carry):
        i, state, ids = carry
        tokens, positions = state.token[:, None], state.position[:, None]
        out = model.forward(
            config, params, tokens, positions=positions, cache=state.cache, options=options
        )
        state = dataclasses.replace(state, cache=out.cache)
        state, new = _advance(config, params, state, out.hidden, chooser)
        return i + 1, state, jax.lax.dynamic_update_index_in_dim(ids, new, i, axis=1)

    def unfinished(carry):
        i, state, _ = carry
        return (i < steps) & ~jnp.all(state.ended)

    none = jnp.full((state.token.shape[0], MAX_STEPS_PER_CALL), ENDED, jnp.int32)
    _, state, ids = jax.lax.while_loop(unfinished, step, (jnp.int32(0), state, none))
    return state, constrain(ids, None, None)


def _advance(config, params, state: State, hidden, chooser: Chooser) -> tuple[State, Array]:
    """The state after choosing a token from hidden (B, 1, D), and the ids to emit (B,)."""
    logits = constrain(model.logits(config, params, hidden)[:, 0], BATCH_AXES, None)
    keys = chooser.keys
    if keys is not None:
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, state.step)
    chosen = sample(logits, keys, chooser.sampling)
    new = jnp.where(state.ended, jnp.int32(ENDED), chosen)
    state = State(
        cache=_placed(state.cache),
        token=jnp.maximum(new, 0),
        position=state.position + jnp.where(state.ended, 0, 1).astype(jnp.int32),
        ended=state.ended | jnp.any(new[:, None] == chooser.eos_id, axis=1) | (new < 0),
        step=state.step + 1,
    )
    return state, new


def _placed(cache: Cache) -> Cache:
    """Rows over data and fsdp, key/value heads over tensor."""
    return jax.tree.map(lambda x: constrain(x, BATCH_AXES, "tensor", None, None), cache)


def _cast_matrices(dtype: str, params: Params) -> Params:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.astype(dtype) if _is_matrix(path_string(path)) else leaf, params
    )


_prefill = jax.jit(_prefill_step, static_argnums=(0, 1, 2, 3))
_decode = jax.jit(_decode_steps, static_argnums=(0, 1), donate_argnums=(3,))
_cast = jax.jit(_cast_matrices, static_argnums=0)
