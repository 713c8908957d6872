"""The `"xla"` engine of `pack_matmul`, and its oracle: a dense matmul, then `TwELL.from_dense`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.gated_ffn.reference import is_active
from pallas_kernels.twell import TwELL


def pack(x: Array, w: Array, bias: Array | None, *, tile: int, compression: int) -> TwELL:
    """relu(x w^T + bias) accumulated in float32, rounded to bfloat16 once, as TwELL."""
    pre = jnp.einsum("...d,fd->...f", x, w, preferred_element_type=jnp.float32)
    if bias is not None:
        pre = pre + bias.astype(jnp.float32)
    dense = jnp.where(is_active(pre), pre, 0.0)
    return TwELL.from_dense(dense, tile=tile, compression=compression)
