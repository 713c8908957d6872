"""Public entry of `pack_matmul`: contract, validation, choice of engine."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

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
    reasons = {"triton": pallas_triton.unsupported(x, w, tile, config), "xla": None}
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
