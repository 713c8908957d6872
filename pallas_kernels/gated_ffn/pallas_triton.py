"""The `"triton"` engine of `gated_ffn`: exact for any pattern, its cost follows the active neurons.

    up to 64 tokens   decode kernels (pallas_triton_decode.py)
    more              XLA's gate matmul, then
                        sparse: lists of active neurons -> row walk -> dense tail
                        dense:  XLA's up and down matmuls

The gate projection stays XLA's: it runs at 780 TFLOP/s on an H200, its dense output costs one pass
of reading (0.045 ms of bandwidth at 16,384 x 5,632), and every sparse epilogue that Triton allows
costs more than that pass. Which of the two follows is decided on the device from a sample of this
call's pre-activations (pallas_triton_plan.py), and so is which rows are too long to walk. All ways
are exact; the sample only moves time. The one choice that the host waits for is `lax.cond`, some
17 us; short calls do without it and send all rows to the tail instead.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import _triton as tl
from pallas_kernels import dispatch
from pallas_kernels.gated_ffn import config as configs
from pallas_kernels.gated_ffn import (
    pallas_triton_decode,
    pallas_triton_plan,
    pallas_triton_tail,
    pallas_triton_walk,
    reference,
)
from pallas_kernels.gated_ffn.config import FFNConfig
from pallas_kernels.gated_ffn.output import FFNOutput
from pallas_kernels.gated_ffn.pallas_triton_backward import Lists, Residuals, backward

__all__ = ["after_gate", "backward", "forward", "unsupported"]

_DTYPES = ("bfloat16", "float32")


def unsupported(x: Array, up: Array, activation: str) -> str | None:
    """Why the engine cannot run this call, or None if it can. Static: shapes, dtypes, platform."""
    if activation != "relu":
        return f"activation {activation!r} makes no zeros to skip; only 'relu' does"
    if str(x.dtype) not in _DTYPES:
        return f"dtype {x.dtype} is not one of {', '.join(_DTYPES)}"
    if x.shape[-1] % 16:
        return f"D must be a multiple of 16, got {x.shape[-1]}"
    if x.size == 0 or up.size == 0:
        return f"empty operand: x {list(x.shape)}, up {list(up.shape)}"
    loose = tl.partitioned_axes()
    if loose:
        return f"mesh axes {loose} are not manual here: put the call inside jax.shard_map"
    if not dispatch.interpreting() and not tl.on_cuda():
        return "it needs a CUDA device (or `with pallas_kernels.interpret():` in tests)"
    return None


def forward(
    x: Array,
    gate: Array | None,
    up: Array,
    down: Array,
    gate_bias: Array | None,
    *,
    count_neurons: bool,
    config: FFNConfig | None,
    training: bool = False,
) -> tuple[FFNOutput, Residuals | None]:
    """h = relu(x gate^T + b) * (x up^T), y = h down, for x (..., D); see `gated_ffn`.

    With `training`, also what `backward` needs.
    """
    lead, (features, width) = x.shape[:-1], up.shape
    rows = x.reshape(-1, width)
    config = config or configs.default(width, features, x.dtype.itemsize)
    saved = Residuals(rows, gate, up, down, gate_bias, None, None, None)
    if rows.shape[0] <= config.decode_tokens and not count_neurons:
        y, l1, nnz = pallas_triton_decode.decode(rows, gate, up, down, gate_bias, config)
        fired, sparse = None, jnp.int32(1)
    else:
        pre = jnp.einsum("md,fd->mf", rows, up if gate is None else gate)
        if gate_bias is not None:
            pre = pre + gate_bias
        y, l1, nnz, lists, up_out = _after_gate(
            rows, pre, up, down, gated=gate is not None, config=config, training=training
        )
        sparse = lists.sparse
        if training:
            saved = saved._replace(lists=lists)
            if config.residuals == "full":
                saved = saved._replace(pre=pre, up_out=up_out)
        fired = jnp.sum(tl.is_active(pre), axis=0, dtype=jnp.int32) if count_neurons else None
    output = FFNOutput(y.reshape(x.shape), l1.reshape(lead), nnz.reshape(lead), fired, sparse)
    return output, saved if training else None


def after_gate(
    x: Array, pre: Array, up: Array, down: Array, *, gated: bool, config: FFNConfig
) -> tuple[Array, Array, Array]:
    """y (M, D), l1 (M,), nnz (M,) from x (M, D) and its pre-activations (M, F)."""
    return _after_gate(x, pre, up, down, gated=gated, config=config, training=False)[:3]


def _after_gate(x, pre, up, down, *, gated: bool, config: FFNConfig, training: bool):
    """(y, l1, nnz, Lists, x up^T or None); the last two hold what `training` asks for."""
    (tokens, width), features = x.shape, up.shape[0]
    full = training and config.residuals == "full" and gated
    sample = pallas_triton_plan.sample_nnz(pre)
    chooses = config.choice == "auto" and tokens >= config.choose_tokens
    limit = pallas_triton_plan.walk_limit(
        sample, tokens, width, features, config, all_rows=config.choice == "auto" and not chooses
    )

    def sparse(x, pre, up, down):
        nnz, columns, values, count, rows = pallas_triton_walk.lists(
            limit, pre, width=config.list_width, chunk=config.list_chunk, warps=config.list_warps
        )
        y, l1, *ups = pallas_triton_walk.walk(
            *(limit, nnz, columns, values, x, up, down),
            gated=gated,
            warps=config.walk_warps,
            save_up=training,
        )
        y, l1, nnz = pallas_triton_tail.tail(
            *(count, rows, x, pre, up, down, y, l1, nnz),
            gated=gated,
            up_tile=config.tail_up,
            down_tile=config.tail_down,
            programs=tl.device_programs(),
        )
        lists = (columns, values, *ups) if training else ()
        up_out = tl.unwritten(pre.shape, x.dtype) if full else ()
        return y, l1, nnz, lists, up_out

    def dense(x, pre, up, down):
        up_out = jnp.einsum("md,fd->mf", x, up) if gated else None
        output = reference.after_gate(x, pre, up_out, down, activation="relu", count_neurons=False)
        lists = ()
        if training:
            shape = (tokens, pallas_triton_walk.list_slots(features, config))
            dtypes = [jnp.int32, pre.dtype, *([x.dtype] if gated else [])]
            lists = tuple(tl.unwritten(shape, dtype) for dtype in dtypes)
        return output.y, output.l1, output.nnz, lists, up_out if full else ()

    if chooses:
        took = pallas_triton_plan.sparse_pays(sample, tokens, width, features, training=training)
        y, l1, nnz, lists, up_out = lax.cond(took, sparse, dense, x, pre, up, down)
        took = took.astype(jnp.int32)
    elif config.choice == "dense":
        y, l1, nnz, lists, up_out = dense(x, pre, up, down)
        took = jnp.int32(0)
    else:
        y, l1, nnz, lists, up_out = sparse(x, pre, up, down)
        took = (limit[0] >= 0).astype(jnp.int32)
    columns, values, ups = lists if len(lists) == 3 else (*lists, *[None] * (3 - len(lists)))
    return y, l1, nnz, Lists(took, limit, nnz, columns, values, ups), up_out if full else None
