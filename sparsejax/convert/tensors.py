"""The tensors of a Hugging Face checkpoint and where each goes in our tree: one table, both ways.

Their linear weights are (out, in). So gate and up are neuron-major as they are stored, down is
transposed, and the attention projections also get their heads as an axis. All families here share
these names; a config says by `param_shapes` which of them exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """How one of their arrays becomes ours: their shape from ours, then both directions.

    Both functions return views wherever NumPy can.
    """

    shape: Callable[[Shape], Shape]
    to_ours: Callable[[np.ndarray, Shape], np.ndarray]
    to_theirs: Callable[[np.ndarray, Shape], np.ndarray]


AS_IS = Layout(lambda s: s, lambda x, s: x, lambda x, s: x)
TRANSPOSED = Layout(lambda s: s[::-1], lambda x, s: x.T, lambda x, s: x.T)
# q, k, v: ours (D, H, K), theirs (H K, D).
HEADS_IN = Layout(
    lambda s: (s[1] * s[2], s[0]),
    lambda x, s: x.reshape(s[1], s[2], s[0]).transpose(2, 0, 1),
    lambda x, s: x.transpose(1, 2, 0).reshape(s[1] * s[2], s[0]),
)
# o: ours (H, K, D), theirs (D, H K).
HEADS_OUT = Layout(
    lambda s: (s[2], s[0] * s[1]),
    lambda x, s: x.reshape(s[2], s[0], s[1]).transpose(1, 2, 0),
    lambda x, s: x.transpose(2, 0, 1).reshape(s[2], s[0] * s[1]),
)
# q, k, v biases: ours (H, K), theirs (H K,).
HEADS_BIAS = Layout(
    lambda s: (s[0] * s[1],), lambda x, s: x.reshape(s), lambda x, s: x.reshape(s[0] * s[1])
)


def cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """`array` in `dtype`; rounding is all that may happen to it.

    Raises:
      ValueError: a finite number would become infinite, as float16 makes of all beyond 65504.
    """
    if array.dtype == dtype:
        return array
    limit = float(jnp.finfo(dtype).max)
    if limit >= float(jnp.finfo(array.dtype).max):
        return array.astype(dtype)
    # NumPy finds extremes of float32 far faster than infinities of the result; NaN fails both.
    if array.dtype == np.float32 and array.size and -limit <= array.min() <= array.max() <= limit:
        return array.astype(dtype)
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    lost = np.isinf(result) & np.isfinite(array)
    if lost.any():
        worst = float(array[lost].astype(np.float64).flat[0])
        raise ValueError(
            f"{name} holds {worst:g}, which {dtype.name} has no number for (its largest is "
            f"{limit:g}); choose bfloat16 or float32"
        )
    return result


_LAYER = "model.layers.{i}."
TABLE: tuple[tuple[str, str, Layout], ...] = (
    ("model.embed_tokens.weight", "embed/embedding", AS_IS),
    (_LAYER + "input_layernorm.weight", "layer_{i}/attn_norm/scale", AS_IS),
    (_LAYER + "self_attn.q_proj.weight", "layer_{i}/attn/q", HEADS_IN),
    (_LAYER + "self_attn.k_proj.weight", "layer_{i}/attn/k", HEADS_IN),
    (_LAYER + "self_attn.v_proj.weight", "layer_{i}/attn/v", HEADS_IN),
    (_LAYER + "self_attn.o_proj.weight", "layer_{i}/attn/o", HEADS_OUT),
    (_LAYER + "self_attn.q_proj.bias", "layer_{i}/attn/q_bias", HEADS_BIAS),
    (_LAYER + "self_attn.k_proj.bias", "layer_{i}/attn/k_bias", HEADS_BIAS),
    (_LAYER + "self_attn.v_proj.bias", "layer_{i}/attn/v_bias", HEADS_BIAS),
    (_LAYER + "self_attn.q_norm.weight", "layer_{i}/attn/q_norm", AS_IS),
    (_LAYER + "self_attn.k_norm.weight", "layer_{i}/attn/k_norm", AS_IS),
    (_LAYER + "post_attention_layernorm.weight", "layer_{i}/ffn_norm/scale", AS_IS),
    (_LAYER + "mlp.gate_proj.weight", "layer_{i}/ffn/gate", AS_IS),
    (_LAYER + "mlp.up_proj.weight", "layer_{i}/ffn/up", AS_IS),
    (_LAYER + "mlp.down_proj.weight", "layer_{i}/ffn/down", TRANSPOSED),
    ("model.norm.weight", "final_norm/scale", AS_IS),
    ("lm_head.weight", "lm_head/kernel", TRANSPOSED),
)
_BY_OURS = {ours: (theirs, layout) for theirs, ours, layout in TABLE}


def counterpart(path: str) -> tuple[str, Layout]:
    """Their name and the layout of our leaf at `path`.

    >>> counterpart("layer_3/ffn/up")[0]
    'model.layers.3.mlp.up_proj.weight'

    Raises:
      ValueError: Hugging Face checkpoints have no such tensor.
    """
    match = re.match(r"layer_(\d+)/", path)
    number = match[1] if match else ""
    key = path.replace(f"layer_{number}/", "layer_{i}/", 1) if match else path
    if key not in _BY_OURS:
        raise ValueError(
            f"{path}: no tensor of a Hugging Face checkpoint stands for it; known are "
            f"{sorted(_BY_OURS)}"
        )
    theirs, layout = _BY_OURS[key]
    return theirs.replace("{i}", number), layout
