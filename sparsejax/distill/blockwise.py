"""Block-local distillation: every block of the student learns on the teacher's activations.

Puzzle trains each replaced block alone, with the parent's activations as its input. All blocks can
do so at once: no block reads another student block, so one forward pass of the teacher serves them
all, there is no pass through the whole student, and the gradient of each error reaches its own
block only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import FFNOutput
from sparsejax.config import ModelConfig
from sparsejax.distill.layer_map import LayerMap
from sparsejax.model import ModelOutput
from sparsejax.modules import REMAT_POLICIES, Layer, Options
from sparsejax.types import Params

Block = tuple[int, ...]
"""Consecutive student layers, of which the last one has a teacher layer."""


def blocks_of(layer_map: LayerMap) -> tuple[Block, ...]:
    """The student's layers cut after each one that has a teacher layer.

    Layers without one belong to the block of the next layer that has.
    """
    blocks: list[Block] = []
    start = 0
    for i, t in enumerate(layer_map):
        if t is not None:
            blocks.append(tuple(range(start, i + 1)))
            start = i + 1
    return tuple(blocks)


def choose_blocks(
    config: ModelConfig, layer_map: LayerMap, layers: Sequence[int] | None
) -> tuple[Block, ...]:
    """The blocks that hold these student layers; None takes all that have parameters.

    Raises:
      ValueError: an unknown layer, one in a block without parameters, or nothing to train.
    """
    blocks = [b for b in blocks_of(layer_map) if any(_holds(config, i) for i in b)]
    if layers is None and not blocks:
        raise ValueError(
            "no layer of the student has parameters that could be trained on their own"
        )
    if layers is None:
        return tuple(blocks)
    known = {i for block in blocks for i in block}
    for i in layers:
        if i not in known:
            raise ValueError(
                f"layers names student layer {i}, and the layers that can be trained on their own "
                f"are {sorted(known)}"
            )
    return tuple(block for block in blocks if set(block) & set(layers))


def block_errors(
    config: ModelConfig,
    params: Params,
    teacher: ModelOutput,
    layer_map: LayerMap,
    blocks: Sequence[Block],
    weights: Array,
    *,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    options: Options = Options(),
) -> tuple[Array, dict[int, FFNOutput]]:
    """(P,) float32: sum |student block(x) - teacher block(x)|^2 / sum |teacher block(x)|^2.

    x is the *teacher's* residual stream before the block, and a block's output is what it adds to
    that stream: 1 is the error of a block that does nothing, 0 that of the teacher's own. The sums
    run over tokens (times `weights`) and features, in float32.

    Args:
      config: the student.
      params: its parameters; gradients reach those of `blocks`.
      teacher: with `hidden_states`, as wide as the student's; gradients do not reach it.
      layer_map: the teacher layer of each student layer.
      blocks: out of `blocks_of(layer_map)`.
      weights: (B, T) float32; a token of weight 0 counts nothing.
      positions: (B, T) rotary positions; None means 0..T-1.
      segment_ids: (B, T) document of each token.
      options: engine, remat, counting.

    Returns:
      The errors, and {layer: FFNOutput} for the layers of `blocks` with a feed-forward part.

    Raises:
      ValueError: a block begins inside a run of parallel layers that began inside another one.

    Source: block-local distillation of Puzzle, arXiv 2411.19146: MSE(o_p, o_c) / MSE(o_p, 0).
    """
    states = jax.lax.stop_gradient(teacher.hidden_states)
    dtype, own = jnp.dtype(config.dtype), options.per_layer(config.num_layers)
    if positions is None:
        steps = jnp.arange(weights.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(steps, weights.shape)

    def before(block: Block) -> Array:
        previous = layer_map[block[0] - 1] if block[0] else None
        return states[0 if previous is None else previous + 1]

    def delta(i: int, base: Array) -> tuple[Array, FFNOutput | None]:
        def run(part: Params, base: Array):
            apply: Any = Layer(config, config.layers[i], own[i]).apply
            return apply({"params": part}, base, positions, segment_ids, None)[:2]

        if options.remat != "none":
            run = jax.checkpoint(run, policy=REMAT_POLICIES[options.remat])
        return run(params[f"layer_{i}"], base)

    errors, stats = [], {}
    starts = {block[0]: block for block in blocks_of(layer_map)}
    for block in blocks:
        x, after = before(block), states[_last(layer_map, block) + 1]
        base, stream = _read_by_first(config, starts, block, before).astype(dtype), x.astype(dtype)
        made = jnp.zeros(x.shape, jnp.float32)
        for k, i in enumerate(block):
            if k and not config.layers[i].parallel_with_previous:
                base = stream
            if not _holds(config, i):
                continue
            out, layer_stats = delta(i, base)
            stream, made = stream + out, made + out.astype(jnp.float32)
            if layer_stats is not None:
                stats[i] = layer_stats
        wanted = after.astype(jnp.float32) - x.astype(jnp.float32)
        total = functools.partial(_weighted, weights)
        errors.append(total(made - wanted) / jnp.maximum(total(wanted), 1e-30))
    return jnp.stack(errors) if errors else jnp.zeros((0,), jnp.float32), stats


def _weighted(weights: Array, x: Array) -> Array:
    squares = jnp.sum(x * x, axis=-1)
    return jnp.sum(jnp.where(weights == 0, 0.0, weights * squares))


def _read_by_first(config: ModelConfig, starts: dict[int, Block], block: Block, before) -> Array:
    """What the first layer of a block reads: the stream before its run of parallel layers."""
    first = block[0]
    while config.layers[first].parallel_with_previous:
        first -= 1
    if first not in starts:
        raise ValueError(
            f"block {list(block)} continues the parallel run that begins with layer {first}, which "
            "another block computes; give every layer of a parallel run a teacher layer"
        )
    return before(starts[first])


def _holds(config: ModelConfig, i: int) -> bool:
    return config.layers[i].attention is not None or config.layers[i].ffn is not None


def _last(layer_map: LayerMap, block: Block) -> int:
    layer = layer_map[block[-1]]
    assert layer is not None
    return layer
