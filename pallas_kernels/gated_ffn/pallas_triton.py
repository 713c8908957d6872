"""The `"triton"` engine of `gated_ffn`: exact for any pattern, its cost follows the active neurons.

    up to 64 tokens   decode kernels (pallas_triton_decode.py)
    more              XLA's gate matmul -> lists of active neurons -> row walk -> dense tail

The gate projection stays XLA's: it runs at 780 TFLOP/s on an H200, its dense output costs one pass
of reading (0.045 ms of bandwidth at 16,384 x 5,632), and every sparse epilogue that Triton allows
costs more than that pass. Which rows are walked and which go to the tail is decided on the device
from a sample of this call's pre-activations, so that nobody sets a knob; both paths are exact, the
sample only moves time. Nothing waits for the host.

The backward pass is the dense engine's, from recomputed pre-activations.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels import _triton as tl
from pallas_kernels import dispatch
from pallas_kernels.gated_ffn import config as configs
from pallas_kernels.gated_ffn import pallas_triton_decode, pallas_triton_tail, pallas_triton_walk
from pallas_kernels.gated_ffn.config import FFNConfig
from pallas_kernels.gated_ffn.output import FFNOutput

_DTYPES = ("bfloat16", "float32")
_SAMPLE = 256  # rows


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
) -> FFNOutput:
    """h = relu(x gate^T + b) * (x up^T), y = h down, for x (..., D); see `gated_ffn`."""
    lead, (features, width) = x.shape[:-1], up.shape
    rows = x.reshape(-1, width)
    if config is None:
        config = configs.default(width, features, x.dtype.itemsize)
    if rows.shape[0] <= config.decode_tokens and not count_neurons:
        y, l1, nnz = pallas_triton_decode.decode(rows, gate, up, down, gate_bias, config)
        fired = None
    else:
        pre = jnp.einsum("md,fd->mf", rows, up if gate is None else gate)
        if gate_bias is not None:
            pre = pre + gate_bias
        y, l1, nnz = after_gate(rows, pre, up, down, gated=gate is not None, config=config)
        fired = jnp.sum(tl.is_active(pre), axis=0, dtype=jnp.int32) if count_neurons else None
    return FFNOutput(y.reshape(x.shape), l1.reshape(lead), nnz.reshape(lead), fired)


def after_gate(
    x: Array, pre: Array, up: Array, down: Array, *, gated: bool, config: FFNConfig
) -> list[Array]:
    """y (M, D), l1 (M,), nnz (M,) from x (M, D) and its pre-activations (M, F)."""
    limit = walk_limit(pre, x.shape[1], config)
    nnz, columns, values, count, rows = pallas_triton_walk.lists(
        limit, pre, width=config.list_width, chunk=config.list_chunk, warps=config.list_warps
    )
    y, l1 = pallas_triton_walk.walk(
        limit, nnz, columns, values, x, up, down, gated=gated, warps=config.walk_warps
    )
    return pallas_triton_tail.tail(
        count,
        rows,
        x,
        pre,
        up,
        down,
        y,
        l1,
        nnz,
        gated=gated,
        up_tile=config.tail_up,
        down_tile=config.tail_down,
        programs=tl.device_programs(),
    )


def walk_limit(pre: Array, width: int, config: FFNConfig) -> Array:
    """(1,) int32: rows with more active neurons than this go to the tail; -1 for all rows.

    Costs, from the H200 measurements in notes_ffn.md, in units of one walked entry (0.88 ns at
    D = 2048 with the chip full): a tail row costs F / 77 of them; a tail that is not empty takes
    0.65 us per 64 of its two depths D and F before its size matters; listing and starting a walked
    row costs 0.11 of a tail row. Only time depends on these numbers.
    """
    tokens, features = pre.shape
    if config.walk_limit is not None:
        return jnp.full((1,), min(config.walk_limit, config.list_width), jnp.int32)
    stride = max(1, tokens // _SAMPLE) | 1  # odd: sequences start at even rows, with long lists
    sample = pre[min(7, tokens - 1) % stride :: stride]
    nnz = jnp.sum(tl.is_active(sample), axis=1, dtype=jnp.int32)
    even = max(1, features // 77)
    scale = tokens / sample.shape[0]
    entry_ns = 0.88 * width / 2048
    tail_entries = 650 * (width + features) / 64 / entry_ns
    saved = jnp.sum(jnp.maximum(nnz - even, 0))
    spared = jnp.sum(jnp.maximum(even - nnz, 0))
    low = min(even, config.list_width)
    limit = jnp.where(saved > int(tail_entries / scale), jnp.int32(low), config.list_width)
    all_rows = spared < int(0.11 * even * sample.shape[0])
    return jnp.where(all_rows, jnp.int32(-1), limit).reshape(1)
