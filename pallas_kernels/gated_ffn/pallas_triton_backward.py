"""Backward pass of the `"triton"` engine: sparse where the forward pass was, exact always.

    lists by token (residuals) -> lists by neuron -> hidden gradients -> dx -> weight gradients

Of the six backward matmuls none stays dense. What does not fit takes another way in the same call,
chosen on the device by one number:

    0   the dense engine's backward: the forward pass was dense, or there are more entries than the
        lists have room for
    1   the kernels alone
    2   the kernels, and the dense backward of the small layer of hot neurons
    3   both, and for rows too long to walk the dense backward over gathered blocks of rows, whose
        float32 sums the kernels add before they round

Residuals are x and the lists: width (2 + 2 + 2) bytes per token in bf16, 1,536 at the default
width of 256 (columns take 4 beyond F = 65,536), where the dense engine keeps 4 F (22,528 at
F = 5632). The dense way then projects gate and up again, half of the neurons at a time.
`residuals="full"` keeps both projections too: the dense way at dense speed, for calls that run
inside a rematerialised block or have memory to spare.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import _triton as tl
from pallas_kernels.gated_ffn import pallas_triton_neurons as neurons
from pallas_kernels.gated_ffn import pallas_triton_row_grads as row_grads
from pallas_kernels.gated_ffn import pallas_triton_weight_grads as weight_grads
from pallas_kernels.gated_ffn import reference
from pallas_kernels.gated_ffn.config import FFNConfig
from pallas_kernels.gated_ffn.pallas_triton_plan import DENSE, HOT


class Lists(NamedTuple):
    """Lists by token as the forward pass leaves them.

    Attributes:
      way: () int32, which way the forward pass took (pallas_triton_plan.py).
      limit: (1,) int32; rows with more active neurons were not walked.
      hot: (H,) int32, neurons kept out of the lists when way is HOT, padded with F.
      nnz: (M,) int32, active neurons that the lists are about.
      columns, values: (M, width), active columns and their pre-activations.
      ups: the same, x . up row of each; None in the non-gated form.
    """

    way: Array
    limit: Array
    hot: Array
    nnz: Array
    columns: Array
    values: Array
    ups: Array | None


class Residuals(NamedTuple):
    """x (M, D) and weights; the lists, or None where there are none; both projections, or None.

    `pre` is x gate^T, the bias not yet in it. `up_out` is x up^T if the lists' way is DENSE, and
    else holds anything.
    """

    x: Array
    gate: Array | None
    up: Array
    down: Array
    gate_bias: Array | None
    lists: Lists | None
    pre: Array | None
    up_out: Array | None


def _dense(saved: Residuals, dy: Array, dl1: Array):
    x, gate, up, down, gate_bias, _, pre, up_out = saved
    if pre is not None:
        pre = tl.add_bias(pre, gate_bias)
        if gate is not None and up_out is None:
            up_out = jnp.einsum("md,fd->mf", x, up)
        full = reference.Residuals(x, gate, up, down, gate_bias, pre, up_out)
        return reference.backward(full, dy, dl1, activation="relu")
    # Half of the neurons at a time: this call's arrays come on top of what all layers keep.
    half = up.shape[0] // 2
    dx, parts = jnp.float32(0), []
    for at in (slice(0, half), slice(half, None)):
        x, dy, dx, parts = lax.optimization_barrier((x, dy, dx, parts))
        part = (None if gate is None else gate[at], up[at], down[at])
        bias = None if gate_bias is None else gate_bias[at]
        pre, up_out = reference.pre_activations(x, part[0], part[1], bias)
        full = reference.Residuals(x, *part, bias, pre, up_out)
        dx_part, *grads = reference.backward(full, dy, dl1, activation="relu", x_dtype=jnp.float32)
        dx += dx_part
        parts.append(grads)
    joined = [None if a is None else jnp.concatenate([a, b]) for a, b in zip(*parts, strict=True)]
    return dx.astype(x.dtype), *joined


def _long_rows(saved: Residuals, dy: Array, dl1: Array, is_long: Array, dx: Array, block: int):
    """The dense backward over the long rows, `block` at a time; sums in float32.

    Returns dx with their rows written, and the gradients of gate, up, down and gate_bias.
    """
    x, gate, up, down, gate_bias, *_ = saved
    tokens = x.shape[0]
    [rows] = jnp.nonzero(is_long, size=tokens, fill_value=tokens)
    rows = jnp.concatenate([rows.astype(jnp.int32), jnp.full((block,), tokens, jnp.int32)])

    def step(i, carry):
        dx, sums = carry
        at = lax.dynamic_slice(rows, (i * block,), (block,))
        # Rows past the end read zeros, which add nothing, and are not written.
        part, dy_part, dl1_part = (a.at[at].get(mode="fill", fill_value=0) for a in (x, dy, dl1))
        pre, up_out = reference.pre_activations(part, gate, up, gate_bias)
        full = reference.Residuals(part, gate, up, down, gate_bias, pre, up_out)
        dx_part, *grads = reference.backward(
            full, dy_part, dl1_part, activation="relu", weight_dtype=jnp.float32
        )
        sums = jax.tree.map(jnp.add, sums, tuple(grads))
        return dx.at[at].set(dx_part, mode="drop"), sums

    zeros = tuple(
        None if w is None else jnp.zeros(w.shape, jnp.float32) for w in (gate, up, down, gate_bias)
    )
    count = jnp.sum(is_long, dtype=jnp.int32)
    return lax.fori_loop(0, (count + block - 1) // block, step, (dx, zeros))


def entries_per_token(features: int, config: FFNConfig) -> int:
    """Entries that the lists by neuron have room for, per token; with more, backward is dense."""
    # Beyond about F / 58 entries per token the dense way is faster; F / 76 with full residuals.
    return min(config.list_width, max(32, features // 56))


def is_deferred(limit: Array, nnz: Array) -> Array:
    """True (M,) for rows that were not walked. With a negative limit nnz was never written."""
    return (limit < 0) | (nnz > limit)


def hot_rows(hot: Array, array: Any) -> Any:
    """Rows (H, ...) of the hot neurons, zeros where `hot` is padded; None for None."""
    return None if array is None else array.at[hot].get(mode="fill", fill_value=0)


def _hot_layer(saved: Residuals, dy: Array, dl1: Array):
    """The dense backward of the small layer of hot neurons; weight gradients in float32."""
    lists = saved.lists
    assert lists is not None
    gate, gate_bias = hot_rows(lists.hot, saved.gate), hot_rows(lists.hot, saved.gate_bias)
    up, down = hot_rows(lists.hot, saved.up), hot_rows(lists.hot, saved.down)
    pre, up_out = reference.pre_activations(saved.x, gate, up, gate_bias)
    full = reference.Residuals(saved.x, gate, up, down, gate_bias, pre, up_out)
    return reference.backward(full, dy, dl1, activation="relu", weight_dtype=jnp.float32)


def _sparse(
    saved: Residuals,
    dy: Array,
    dl1: Array,
    config: FFNConfig,
    capacity: int,
    *,
    tail: bool = False,
    hot: bool = False,
):
    x, gate, up, down, gate_bias, lists, *_ = saved
    assert lists is not None
    features = up.shape[0]
    limit, nnz = lists.limit, lists.nnz
    dx_hot: Array | None = None
    hot_grads: tuple[Any, ...] | None = None
    if hot:
        # Long rows are not the hot layer's: the dense backward takes them in full.
        is_long = is_deferred(limit, nnz)
        dy_hot, dl1_hot = dy, dl1
        if tail:
            dy_hot = jnp.where(is_long[:, None], jnp.zeros_like(dy), dy)
            dl1_hot = jnp.where(is_long, 0.0, dl1)
        dx_hot, *grads = _hot_layer(saved, dy_hot, dl1_hot)
        hot_grads = tuple(grads)
    places = neurons.by_neuron(
        limit, nnz, lists.columns, features, segment=config.grad_segment, capacity=capacity
    )
    by_token = (limit, nnz, lists.columns, lists.values, lists.ups)
    dpre, *rest = row_grads.hidden(
        *by_token,
        *(dy, dl1, down),
        unroll=config.grad_hidden_unroll,
        warps=config.grad_hidden_warps,
    )
    dup = rest[0] if rest else None
    entries = row_grads.reorder(*by_token, dpre, dup, places, capacity=capacity)
    factors = [(up, dpre)] if gate is None else [(gate, dpre), (up, dup)]
    dx = row_grads.dx(
        limit,
        nnz,
        lists.columns,
        factors,
        dx_hot,
        unroll=config.grad_unroll,
        warps=config.grad_warps,
    )
    tail_grads: tuple[Any, ...] | None = None
    if tail:
        block = min(config.grad_rows, x.shape[0])
        dx, sums = _long_rows(saved, dy, dl1, is_deferred(limit, nnz), dx, block)
        tail_grads = tuple(sums)
        if hot_grads is not None:
            # Both are float32 and go under the kernels' sums, which are zero at the hot neurons.
            bases_and_rows = zip(tail_grads, hot_grads, strict=True)
            tail_grads = tuple(
                None if base is None else base.at[lists.hot].add(rows, mode="drop")
                for base, rows in bases_and_rows
            )
            hot_grads = None
    bases = None
    if tail_grads is not None:
        dgate, dup, ddown, _ = tail_grads
        bases = [g for g in (ddown, dgate, dup) if g is not None]
    grads = weight_grads.weights(
        x,
        dy,
        places,
        entries,
        bases,
        segment=config.grad_segment,
        unroll=config.grad_unroll_weights,
        columns=config.grad_columns,
        warps=config.grad_weights_warps,
    )
    ddown, dgate, dup = grads if gate is not None else (grads[0], None, grads[1])
    dbias: Any = None
    if gate_bias is not None:
        dbias = weight_grads.bias(places, entries)
        if tail_grads is not None:
            dbias += tail_grads[3]
        dbias = dbias.astype(gate_bias.dtype)
    result: tuple[Any, ...] = (dgate, dup, ddown, dbias)
    if hot_grads is not None:
        result = tuple(
            None if g is None else g.at[lists.hot].set(rows.astype(g.dtype), mode="drop")
            for g, rows in zip(result, hot_grads, strict=True)
        )
    return dx, *result


def backward(saved: Residuals, dy: Array, dl1: Array, config: FFNConfig):
    """Gradients of (y (M, D), l1 (M,)) for x, gate, up, down and gate_bias; None for absent ones.

    Args:
      saved: residuals of the forward pass.
      dy: (M, D).
      dl1: (M,) float32.
      config: launch configuration.
    """
    lists = saved.lists
    if lists is None:
        return _dense(saved, dy, dl1)
    tokens, features = saved.x.shape[0], saved.up.shape[0]
    capacity = tokens * entries_per_token(features, config)
    walked = jnp.logical_not(is_deferred(lists.limit, lists.nnz))
    # Counted in float32: tokens times F may not fit an int32; 1 in 2^24 does not matter here.
    count = jnp.sum(jnp.where(walked, lists.nnz, 0).astype(jnp.float32))
    long_rows = tokens - jnp.sum(walked, dtype=jnp.int32)
    fits = (lists.way > DENSE) & (count < 0.999 * capacity) & (long_rows <= tokens // 4)
    # 1 lists alone, 2 with the hot layer, 3 with both it and long rows.
    way = jnp.where(long_rows > 0, 3, jnp.where(lists.way == HOT, 2, 1)) * fits.astype(jnp.int32)
    apart = config.choice != "sparse"  # hot neurons may be apart
    if not apart:
        way = jnp.where(long_rows > 0, 2, 1) * fits.astype(jnp.int32)
    # Residuals that a way does not read must not keep its operands alive: drop them per way.
    # Under vmap every way runs, also on lists that were not made or do not fit: -1, so unread.
    lists = lists._replace(limit=jnp.where(fits, lists.limit, -1))
    lean = saved._replace(lists=lists, pre=None, up_out=None)
    # Without hot neurons apart, their list is all padding for the third way.
    kept_out = jnp.where(lists.way == HOT, lists.hot, features)
    third = lean._replace(lists=lists._replace(hot=kept_out))

    def sparse(saved: Residuals, **options: bool):
        return lambda dy, dl1: _sparse(saved, dy, dl1, config, capacity, **options)

    def dense(saved: Residuals):
        return lambda dy, dl1: _dense(saved, dy, dl1)

    ways = [dense(saved), sparse(lean)]
    if apart:
        ways.append(sparse(lean, hot=True))
    ways.append(sparse(third, hot=apart, tail=True))
    if saved.up_out is not None:
        # The forward pass ran sparse, wrote no up_out, and left too much to be sparse here.
        unwritten = jnp.logical_not(fits) & (lists.way != DENSE)
        way = jnp.where(unwritten, len(ways), way)
        ways.append(dense(saved._replace(up_out=None)))
    return lax.switch(way, ways, dy, dl1)
