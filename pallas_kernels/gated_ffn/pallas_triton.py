"""The `"triton"` engine of `gated_ffn`: exact for any pattern, its cost follows the active neurons.

    up to 64 tokens   decode kernels (pallas_triton_decode.py)
    more              XLA's gate matmul, then
                        sparse: lists of active neurons -> row walk -> dense tail
                        hot:    the same, and a small dense layer of the neurons that fire most
                        dense:  XLA's up and down matmuls

The gate projection stays XLA's: it runs at 780 TFLOP/s on an H200, its dense output costs one pass
of reading (0.045 ms of bandwidth at 16,384 x 5,632), and every sparse epilogue that Triton allows
costs more than that pass. Which way follows is decided on the device from a sample of this call's
pre-activations (pallas_triton_plan.py), and so is which rows are too long to walk. All ways are
exact; the sample only moves time. A `lax.switch` costs some 17 us; short calls do without it and
send all rows to the tail where that is better.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import _triton as tl
from pallas_kernels import dispatch, tuning
from pallas_kernels.gated_ffn import (
    pallas_triton_decode,
    pallas_triton_plan,
    pallas_triton_tail,
    pallas_triton_walk,
    reference,
)
from pallas_kernels.gated_ffn import pallas_triton_long_rows as long_rows
from pallas_kernels.gated_ffn.config import FFNConfig
from pallas_kernels.gated_ffn.output import FFNOutput
from pallas_kernels.gated_ffn.pallas_triton_backward import (
    Lists,
    Residuals,
    backward,
    hot_rows,
    is_deferred,
)

__all__ = ["after_gate", "backward", "forward", "unsupported"]

_DTYPES = ("bfloat16", "float32")


def unsupported(x: Array, up: Array, activation: str) -> str | None:
    """Why the engine cannot run this call, or None if it can. Static: shapes, dtypes, platform."""
    reason = unsupported_layer(x, up, activation)
    if reason is not None:
        return reason
    loose = tl.partitioned_axes()
    if loose:
        return f"mesh axes {loose} are not manual here: put the call inside jax.shard_map"
    if not dispatch.interpreting() and not tl.on_cuda():
        return "it needs a CUDA device (or `with pallas_kernels.interpret():` in tests)"
    return None


def unsupported_layer(
    x: Array | jax.ShapeDtypeStruct, up: Array | jax.ShapeDtypeStruct, activation: str
) -> str | None:
    """Why no device can run this call, or None: shapes and dtypes alone."""
    if activation != "relu":
        return f"activation {activation!r} makes no zeros to skip; only 'relu' does"
    if str(x.dtype) not in _DTYPES:
        return f"dtype {x.dtype} is not one of {', '.join(_DTYPES)}"
    if x.shape[-1] % 16:
        return f"D must be a multiple of 16, got {x.shape[-1]}"
    if x.size == 0 or up.size == 0:
        return f"empty operand: x {list(x.shape)}, up {list(up.shape)}"
    return None


def pays(x: Array, up: Array) -> bool:
    """Whether a call of these shapes was measured to gain, or lose no more than a few percent."""
    tokens, (features, width) = math.prod(x.shape[:-1]), up.shape
    large = tokens >= 4096 and width >= 1536 and features >= 4096
    measured = x.dtype == jnp.bfloat16 and tuning.compute_capability() >= 90
    return large and measured and not dispatch.interpreting()


def forward(
    x: Array,
    gate: Array | None,
    up: Array,
    down: Array,
    gate_bias: Array | None,
    *,
    count_neurons: bool,
    config: FFNConfig,
    training: bool = False,
) -> tuple[FFNOutput, Residuals | None]:
    """h = relu(x gate^T + b) * (x up^T), y = h down, for x (..., D); see `gated_ffn`.

    With `training`, also what `backward` needs.
    """
    lead, width = x.shape[:-1], x.shape[-1]
    rows = x.reshape(-1, width)
    saved = Residuals(rows, gate, up, down, gate_bias, None, None, None)
    if rows.shape[0] <= config.decode_tokens and not count_neurons:
        y, l1, nnz = pallas_triton_decode.decode(rows, gate, up, down, gate_bias, config)
        fired, sparse = None, jnp.int32(1)
    else:
        pre = jnp.einsum("md,fd->mf", rows, up if gate is None else gate)
        y, l1, nnz, way, lists, up_out = _after_gate(
            *(rows, pre, gate_bias, up, down),
            gated=gate is not None,
            config=config,
            training=training,
        )
        sparse, fired = jnp.minimum(way, 1), None
        if training:
            saved = saved._replace(lists=lists)
            if config.residuals == "full":
                saved = saved._replace(pre=pre, up_out=up_out)
        if count_neurons:
            active = tl.is_active(tl.add_bias(pre, gate_bias))
            fired = jnp.sum(active, axis=0, dtype=jnp.int32)
    output = FFNOutput(y.reshape(x.shape), l1.reshape(lead), nnz.reshape(lead), fired, sparse)
    return output, saved if training else None


def after_gate(
    x: Array, pre: Array, up: Array, down: Array, *, gated: bool, config: FFNConfig
) -> tuple[Array, Array, Array]:
    """y (M, D), l1 (M,), nnz (M,) from x (M, D) and its pre-activations (M, F)."""
    return _after_gate(x, pre, None, up, down, gated=gated, config=config, training=False)[:3]


def _after_gate(x, pre, bias, up, down, *, gated: bool, config: FFNConfig, training: bool):
    """(y, l1, nnz, way, Lists or None, x up^T or None); the last two on `training`'s account.

    `pre` is without the bias: every kernel adds it where it reads.
    """
    (tokens, width), features = x.shape, up.shape[0]
    full = training and config.residuals == "full" and gated
    plan = pallas_triton_plan.plan(pre, bias, width, config, training=training)
    # The backward pass takes long rows by the plan's limit: more of them cost it more.
    settled = training or config.walk_limit is not None
    few = 0 if settled else long_rows.few_rows(x.dtype)

    def sparse(hot: FFNOutput | None):
        nnz, columns, values, long = pallas_triton_walk.lists(
            plan.limit,
            pre,
            bias,
            None if hot is None else plan.hot_words,
            width=config.list_width,
            chunk=config.list_chunk,
            warps=config.list_warps,
            few=few,
        )
        y, l1, *ups = pallas_triton_walk.walk(
            *(plan.limit, long.counts, nnz, columns, values, x, up, down),
            None if hot is None else hot.y,
            gated=gated,
            warps=config.walk_warps,
            save_up=training,
            few=few,
        )
        # Long rows are the tail's in full, their hot neurons included.
        y, l1, total = pallas_triton_tail.tail(
            *(long, x, pre, bias, up, down, y, l1, nnz),
            gated=gated,
            up_tile=config.tail_up,
            down_tile=config.tail_down,
            programs=tl.device_programs(),
        )
        if hot is not None:
            is_long = is_deferred(long_rows.walk_limit(plan.limit, long.counts, few), nnz)
            l1 = jnp.where(is_long, l1, l1 + hot.l1)
            total = jnp.where(is_long, total, total + hot.nnz)
        lists = (nnz, columns, values, *ups) if training else ()
        return y, l1, total, lists, tl.unwritten(pre.shape, x.dtype) if full else ()

    def with_hot():
        # Padding reads zeros, which are not active.
        pre_hot = tl.add_bias(
            pre.at[:, plan.hot].get(mode="fill", fill_value=0), hot_rows(plan.hot, bias)
        )
        up_out = jnp.einsum("md,fd->mf", x, hot_rows(plan.hot, up)) if gated else None
        hot = reference.after_gate(
            x, pre_hot, up_out, hot_rows(plan.hot, down), activation="relu", count_neurons=False
        )
        return sparse(hot)

    def dense():
        up_out = jnp.einsum("md,fd->mf", x, up) if gated else None
        h, l1, nnz = pallas_triton_tail.product(pre, bias, up_out)
        lists = ()
        if training:
            slots = pallas_triton_walk.list_slots(features, config.list_width, config.list_chunk)
            shape = (tokens, slots)
            dtypes = [
                pallas_triton_walk.column_dtype(features),
                pre.dtype,
                *([x.dtype] if gated else []),
            ]
            lists = (nnz, *(tl.unwritten(shape, dtype) for dtype in dtypes))
        return jnp.einsum("mf,fd->md", h, down), l1, nnz, lists, up_out if full else ()

    ways = [dense, lambda: sparse(None), with_hot]
    if config.choice == "auto" and tokens >= config.choose_tokens:
        y, l1, nnz, lists, up_out = lax.switch(plan.way, ways)
    else:
        only = {"dense": 0, "hot": 2}.get(config.choice, 1)
        y, l1, nnz, lists, up_out = ways[only]()
        full = full and only == 0  # the others have not written it
    if not training:
        return y, l1, nnz, plan.way, None, None
    walked_nnz, columns, values, *ups = lists
    saved = Lists(
        plan.way, plan.limit, plan.hot, walked_nnz, columns, values, ups[0] if ups else None
    )
    return y, l1, nnz, plan.way, saved, up_out if full else None
