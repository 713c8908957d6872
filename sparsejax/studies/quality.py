"""Held-out cross-entropy of many changed models, and the error of an engine.

A model is walked part by part (`sparsejax.analysis.steps.Walk`), so that a study of dozens of
changed models compiles one small program per kind of layer and none per model.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sparsejax.analysis.steps import Walk, on_mesh, read_batches
from sparsejax.config import ModelConfig
from sparsejax.data import TokenSource
from sparsejax.losses import cross_entropy
from sparsejax.model import Options, forward, head_weight
from sparsejax.types import Params

Windows = list[dict[str, np.ndarray]]


def windows(
    source: TokenSource, seq_len: int, batch_size: int, *, batches: int | None = None
) -> Windows:
    """Consecutive windows of a text as batches (B, T): "tokens", "targets", "loss_mask".

    Batches are as equal as can be, of at most `batch_size` rows; rows that fill up the last one are
    masked. The end of the text that is no whole window is left out.

    Raises:
      ValueError: a text shorter than a window.
    """
    count = (len(source.tokens) - 1) // seq_len
    if not count:
        raise ValueError(
            f"windows: {source.label} has {len(source.tokens)} tokens, a window needs {seq_len + 1}"
        )
    count = count if batches is None else min(count, batches * batch_size)
    parts = -(-count // batch_size)
    rows = -(-count // parts)
    starts = np.minimum(np.arange(parts * rows), count - 1) * seq_len
    ids = np.asarray(source.tokens)[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
    mask = np.broadcast_to((np.arange(parts * rows) < count)[:, None], (parts * rows, seq_len))
    return [
        {"tokens": ids[k : k + rows, :-1], "targets": ids[k : k + rows, 1:]}
        | {"loss_mask": mask[k : k + rows]}
        for k in range(0, parts * rows, rows)
    ]


def num_tokens(batches: Windows) -> int:
    """Tokens that `held_out` scores."""
    return sum(int(np.sum(batch["loss_mask"])) for batch in batches)


def held_out(config: ModelConfig, params: Params, batches: Sequence[dict[str, Any]]) -> float:
    """Mean cross-entropy, nats per unmasked token, over `windows`."""
    walk = Walk(config, params)
    total, tokens = 0.0, 0
    head = head_weight(config, params)
    with on_mesh(params):
        for found, batch in zip(read_batches("held_out", batches), batches, strict=True):
            stream = walk.embed(found)
            for i in range(config.num_layers):
                stream = walk.step(i, stream, found)
            total += float(_sum_ce(walk.finish(stream), head, batch["targets"], found.mask))
            tokens += found.count
    return total / tokens


def engine_errors(
    config: ModelConfig, params: Params, tokens: Any, sparse: str | None
) -> dict[str, float | None]:
    """|y - z| / |z| of final hidden states y in compute dtype by engine, z dense in float32.

    Args:
      config: the model.
      params: its parameters.
      tokens: (B, T) ids.
      sparse: the sparse engine, asked for by name (by itself a small layer takes the dense one);
        None where it cannot run.

    Returns:
      "error_dense", and "error_sparse", None without a sparse engine.
    """
    exact = config.replace(dtype="float32")
    ids = jnp.asarray(tokens, jnp.int32)
    with jax.default_matmul_precision("highest"):
        reference = _hidden(exact, Options(implementation="xla"), params, ids)
    norm = jnp.linalg.norm(reference)

    def error(implementation: str) -> float:
        found = _hidden(config, Options(implementation=implementation), params, ids)
        return float(jnp.linalg.norm(found.astype(jnp.float32) - reference) / norm)

    return {"error_dense": error("xla"), "error_sparse": None if sparse is None else error(sparse)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _hidden(config: ModelConfig, options: Options, params: Params, tokens: Array) -> Array:
    return forward(config, params, tokens, options=options).hidden


@jax.jit
def _sum_ce(hidden: Array, head: Array, targets: Array, mask: Array) -> Array:
    return jnp.sum(jnp.where(mask, cross_entropy(hidden, head, targets), 0.0))
