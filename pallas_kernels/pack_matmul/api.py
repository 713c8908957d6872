"""Public entry of `pack_matmul`: contract, validation, choice of engine."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import _triton as tl
from pallas_kernels import dispatch
from pallas_kernels.pack_matmul import config as configs
from pallas_kernels.pack_matmul import pallas_triton, reference
from pallas_kernels.pack_matmul.config import PackConfig
from pallas_kernels.twell import TwELL, slots_of


def pack_matmul(
    x: Array,
    w: Array,
    *,
    bias: Array | None = None,
    tile: int = 256,
    compression: int = 8,
    implementation: str | None = None,
    config: PackConfig | None = None,
) -> TwELL:
    """relu(x w^T + bias) as TwELL, for x (..., D) and w (F, D): a matmul that writes it sparse.

    Pre-activations accumulate in float32 and round to bfloat16 once. A column is active when its
    pre-activation is not <= 0 (a NaN is active). Counts are exact also where a tile overflows its
    `tile / compression` slots: check `overflowed()`; `to_dense` is NaN there. Not differentiable.

    Args:
      x: (..., D) bfloat16 or float32, any number of leading dimensions.
      w: (F, D), dtype of x, neuron-major; F at most 65,536.
      bias: optional (F,), dtype of x, added to the pre-activation.
      tile: T, columns of one TwELL tile.
      compression: C; a tile has T / C slots.
      implementation: "triton" (CUDA), "xla" (a dense matmul, then `TwELL.from_dense`) or None.
      config: launch configuration of the triton engine; None takes the default.

    Returns:
      TwELL with entries (..., tiles, T / C) and counts (..., tiles).

    Raises:
      ValueError: shapes, dtypes, tile or compression do not fit.
      UnsupportedError: the requested implementation cannot run this call.

    Source: dense-to-TwELL kernel of arXiv 2603.23198, without its overflow.
    """
    _validate(x, w, bias)
    slots = slots_of(w.shape[0], tile, compression)
    if config is None:
        config = configs.default(x.dtype.itemsize)
    reasons = {"triton": _unsupported(x, w, tile, config), "xla": None}
    engine = dispatch.select("pack_matmul", implementation, reasons)
    if engine == "xla":
        return reference.pack(x, w, bias, tile=tile, compression=compression)
    rows = x.reshape(-1, x.shape[-1])
    if config.method == "bits":
        mask, values = pallas_triton.bits(rows, w, bias, config.tile)
        entries, counts = pallas_triton.expand(mask, values, tile=tile, slots=slots)
    else:
        shape = _direct_tile(tile, config)
        entries, counts = pallas_triton.direct(rows, w, bias, shape, slots)
    tiles = counts.shape[1]
    entries = entries[:, : tiles * slots].reshape(*x.shape[:-1], tiles, slots)
    entries = lax.bitcast_convert_type(entries, jnp.uint32)
    return TwELL(entries, counts.reshape(*x.shape[:-1], tiles), w.shape[0], tile)


def _direct_tile(tile: int, config: PackConfig):
    """The matmul tile of the direct method: TwELL's columns, and rows that still compile."""
    rows = min(config.tile.rows, 128 * 128 // tile)
    return dataclasses.replace(config.tile, rows=rows, columns=tile)


def _unsupported(x: Array, w: Array, tile: int, config: PackConfig) -> str | None:
    loose = tl.partitioned_axes()
    if loose:
        return f"mesh axes {loose} are not manual here: put the call inside jax.shard_map"
    if not dispatch.interpreting() and not tl.on_cuda():
        return "it needs a CUDA device (or `with pallas_kernels.interpret():` in tests)"
    if str(x.dtype) not in ("bfloat16", "float32"):
        return f"dtype {x.dtype} is not one of bfloat16, float32"
    if x.shape[-1] % 16:
        return f"D must be a multiple of 16, got {x.shape[-1]}"
    if x.size == 0 or w.size == 0:
        return f"empty operand: x {list(x.shape)}, w {list(w.shape)}"
    if tile % 32 or tile & (tile - 1):
        return f"tile must be a power of two >= 32, got {tile}"
    if config.method == "direct" and tile > 256:
        return f'method "direct" holds one tile of columns per program, at most 256, got {tile}'
    return None


def _validate(x: Array, w: Array, bias: Array | None) -> None:
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"pack_matmul: x must be floating point (..., D), got {jax.typeof(x)}")
    if w.ndim != 2 or w.shape[1] != x.shape[-1]:
        raise ValueError(
            f"pack_matmul: w must be (F, D) with D = {x.shape[-1]} as in x, got {list(w.shape)}"
            + ("; weights are neuron-major, pass w.T" if w.shape[:1] == x.shape[-1:] else "")
        )
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"pack_matmul: bias must be ({w.shape[0]},), got {list(bias.shape)}")
    for name, array in (("w", w), ("bias", bias)):
        if array is not None and array.dtype != x.dtype:
            raise ValueError(
                f"pack_matmul: {name} must have x's dtype {x.dtype}, got {array.dtype}; "
                f"cast it with {name}.astype(x.dtype)"
            )
