"""The two compiled programs of evaluation: losses summed by position, and the score of each token.

Both take rows (B, T) placed over data and fsdp and return replicated arrays, so that every process
of a launch reads the same results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparsejax.config import ModelConfig
from sparsejax.losses import cross_entropy
from sparsejax.model import ModelOutput, Options, forward, head_weight
from sparsejax.sharding import BATCH_AXES, constrain
from sparsejax.types import Params

# Float32 logits that exist at a time, over all devices: 256 MB.
_MAX_LOGITS = 1 << 26

Program = Callable[[Params, Any], dict[str, Array]]


@functools.lru_cache(maxsize=16)
def position_sums(config: ModelConfig, options: Options, mesh: Mesh) -> Program:
    """`(params, batch) -> nats (T,), tokens (T,), nnz (L,)`, sums over the rows' unmasked targets.

    The batch is {"tokens", "targets", "loss_mask"} (B, T), with documents also "positions" and
    "segment_ids".
    """

    def run(params: Params, batch: dict[str, Array]) -> dict[str, Array]:
        out, mask = _forward(config, options, params, batch), batch["loss_mask"]
        nats = cross_entropy(out.hidden, head_weight(config, params), batch["targets"])
        nnz = jnp.where(mask, out.stats.nnz, 0)
        return {
            "nats": jnp.sum(jnp.where(mask, nats, 0.0), axis=0),
            "tokens": jnp.sum(mask, axis=0, dtype=jnp.int32),
            "nnz": jnp.sum(nnz, axis=(1, 2), dtype=jnp.float32),
        }

    return _compiled(run, mesh)


@functools.lru_cache(maxsize=16)
def token_scores(config: ModelConfig, options: Options, mesh: Mesh, num_tokens: int) -> Program:
    """`(params, batch) -> logprob (B, T), greedy (B, T)` of {"tokens", "targets"} (B, T).

    logprob is float32 log softmax(logits)[target]; greedy says whether the target is the most
    probable of the first `num_tokens` ids.
    """

    def run(params: Params, batch: dict[str, Array]) -> dict[str, Array]:
        hidden = _forward(config, options, params, batch).hidden
        head, targets = head_weight(config, params), batch["targets"]
        ids = jnp.arange(config.vocab_size, dtype=jnp.int32)

        def score(part: tuple[Array, Array]) -> dict[str, Array]:
            hidden, targets = part
            out = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)
            out = constrain(out, BATCH_AXES, None, "tensor")
            at_target = jnp.sum(jnp.where(targets[..., None] == ids, out, 0.0), axis=-1)
            best = jnp.argmax(jnp.where(ids < num_tokens, out, -jnp.inf), axis=-1)
            logprob = at_target - jax.nn.logsumexp(out, axis=-1)
            return {"logprob": logprob, "greedy": best.astype(jnp.int32) == targets}

        rows, length = targets.shape
        parts = _num_parts(rows, length, config.vocab_size)
        scores = jax.lax.map(score, (_split(hidden, parts), _split(targets, parts)))
        return jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(targets.shape), scores)

    return _compiled(run, mesh)


def _forward(config: ModelConfig, options: Options, params: Params, batch: Any) -> ModelOutput:
    return forward(
        config,
        params,
        batch["tokens"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        options=options,
    )


def _compiled(run: Program, mesh: Mesh) -> Program:
    jitted = jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def call(params: Params, batch: Any) -> dict[str, Array]:
        with jax.set_mesh(mesh):
            return jitted(params, batch)

    return call


def _num_parts(rows: int, length: int, vocab: int) -> int:
    """The least number of equal parts of a row whose logits stay within `_MAX_LOGITS`."""
    divisors = (n for n in range(1, length + 1) if length % n == 0)
    return next((n for n in divisors if rows * (length // n) * vocab <= _MAX_LOGITS), length)


def _split(array: Array, parts: int) -> Array:
    """(B, T, ...) -> (parts, B, T / parts, ...)."""
    rows, length, *rest = array.shape
    return array.reshape(rows, parts, length // parts, *rest).swapaxes(0, 1)
