"""Launch configurations of the `"triton"` engine of `gated_ffn`, and the rule that picks one."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp

from pallas_kernels import tuning

_Choice = Literal["auto", "sparse", "hot", "dense"]
Residuals = Literal["compact", "full"]


@dataclasses.dataclass(frozen=True)
class FFNConfig:
    """How the engine is launched; every field may be set, none has to be.

    Attributes:
      decode_tokens: up to this many tokens take the decode kernels.
      walk_limit: rows with more active neurons go to the dense tail; None decides on the device
        from a sample of the pre-activations of this very call, a negative number sends all rows.
      list_width: longest row that can be walked.
      list_chunk, list_warps: columns per step and warps of the kernel that lists active neurons.
      walk_warps: warps of one token's walk.
      tail_up, tail_down: tiles of the two dense matmuls.
      decode_neurons, decode_depth: neurons per program (at most 32) and depth step in decode, for
        more than 4 tokens; powers of two.
      choice: "auto" decides on the device, from `choose_tokens` tokens on (a choice costs some
        17 us, under it the sparse path runs); "sparse"; "hot", sparse with a small dense layer of
        the neurons that fire most; "dense".
      choose_tokens: see `choice`.
      hot_neurons: most neurons of that small dense layer, a multiple of 16.
      residuals: what the backward pass keeps: "compact" (x and lists), or "full" (both projections
        too, so that a call that turned out dense need not compute them again).
      grad_hidden_unroll, grad_hidden_warps: entries per step and warps of the hidden gradients.
      grad_unroll, grad_warps: entries per step and warps of dx.
      grad_segment, grad_unroll_weights: entries per program and per step of the weight gradients.
      grad_columns, grad_weights_warps: columns of D (a power of two) and warps of such a program.
      grad_rows: long rows per step of the dense backward.
    """

    decode_tokens: int = 64
    walk_limit: int | None = None
    list_width: int = 256
    list_chunk: int = 1024
    list_warps: int = 1
    walk_warps: int = 4
    tail_up: tuning.MatmulTile = tuning.HOPPER_TILE
    tail_down: tuning.MatmulTile = tuning.HOPPER_TILE
    decode_neurons: int = 16
    decode_depth: int = 256
    choice: _Choice = "auto"
    choose_tokens: int = 2048
    hot_neurons: int = 128
    residuals: Residuals = "compact"
    grad_hidden_unroll: int = 4
    grad_hidden_warps: int = 1
    grad_warps: int = 4
    grad_unroll: int = 2
    grad_segment: int = 512
    grad_unroll_weights: int = 4
    grad_columns: int = 256
    grad_weights_warps: int = 1
    grad_rows: int = 512

    def __post_init__(self):
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"FFNConfig: {name} must be one of {list(known)}, got {getattr(self, name)!r}"
                )
        for least, names in _LEAST.items():
            for name in names:
                if getattr(self, name) < least:
                    raise ValueError(
                        f"FFNConfig: {name} must be at least {least}, got {getattr(self, name)}"
                    )
        for name in _POWERS:
            value = getattr(self, name)
            if value & (value - 1):
                raise ValueError(f"FFNConfig: {name} must be a power of two, got {value}")
        if self.decode_neurons > 32:  # a word has a bit for each
            raise ValueError(
                f"FFNConfig: decode_neurons must be at most 32, got {self.decode_neurons}"
            )


_KNOWN = {"choice": get_args(_Choice), "residuals": get_args(Residuals)}
_POWERS = (
    *("list_chunk", "list_warps", "walk_warps", "grad_hidden_warps", "grad_warps"),
    *("grad_columns", "grad_weights_warps", "decode_neurons", "decode_depth"),
)
_LEAST = {
    0: ("decode_tokens", "list_width", "choose_tokens", "hot_neurons"),
    1: (
        *_POWERS[1:],
        *("grad_hidden_unroll", "grad_unroll"),
        *("grad_segment", "grad_unroll_weights", "grad_rows"),
    ),
    32: ("list_chunk",),
}


# Each setting with what it was chosen from: ms on one H200, jax 0.11.2, bf16, by
# experiments/tune_ffn.py or its forerunners; 16,384 x 2048 x 5632 and 16,384 x 1024 x 2816.
MEASURED = {
    tuning.Bucket("NVIDIA H200", "bfloat16", 16384, 2048, 4096): {
        # 1 / 2 / 4 / 8 warps: 0.332 / 0.311 / 0.292 / 0.344 at 15 active neurons, 0.529 / 0.507 /
        # 0.517 / 0.592 at 30, 0.994 / 0.940 / 0.972 / 1.104 at 60.
        "walk_warps": 4,
        # 1 / 2 / 4 warps of 4 entries, launch included: 0.30 / 0.33 / 0.36 at 30, 0.55 / 0.63 /
        # 0.65 at 60; 1 warp of 1 / 2 / 4 entries: 0.31 / 0.33 / 0.30 and 0.61 / 0.60 / 0.55.
        "grad_hidden_warps": 1,
        "grad_hidden_unroll": 4,
        # 2 / 4 / 8 warps 0.456 / 0.457 / 0.453 at 30, 0.731 / 0.757 / 0.815 at 60 by a power law;
        # 1 / 2 / 4 entries a step: 0.449 / 0.456 / 0.452.
        "grad_warps": 4,
        "grad_unroll": 2,
        # 2 / 4 / 8 entries a step: 0.532 / 0.524 / 0.556 at 30.
        "grad_unroll_weights": 4,
        # At most 64 / 128 / 256, training, power law: 2.42 / 2.28 / 2.43 at 30, 3.60 / 3.28 / 3.17
        # at 60.
        "hot_neurons": 128,
    },
    tuning.Bucket("NVIDIA H200", "bfloat16", 16384, 1024, 2048): {
        # The stages after the gate. 1 / 2 / 4 / 8: 0.110 / 0.102 / 0.107 / 0.124 at 4 active
        # neurons, 0.182 / 0.171 / 0.178 / 0.231 at 13.
        "walk_warps": 2,
        # 1 / 2 / 4: 0.103 / 0.117 / 0.146 at 4, 0.171 / 0.195 / 0.233 at 13.
        "list_warps": 1,
    },
}


def default(
    tokens: int, width: int, features: int, dtype: Any, device: str | None = None
) -> FFNConfig:
    """The configuration for x (tokens, width) and weights (features, width).

    Measured where known (`MEASURED`), else scaled from it: one warp of the walk holds 512 to 1,024
    columns of x and of the result in registers, one warp of the hidden gradients a row of 2,048.
    Tiles fit the device's shared memory.
    """
    padded = 1 << (width - 1).bit_length()
    tile = tuning.matmul_tile(jnp.dtype(dtype).itemsize)
    config = FFNConfig(
        walk_warps=min(16, max(1, 1 << max(0, (width - 1) // 768).bit_length())),
        grad_hidden_warps=max(1, min(16, padded // 2048)),
        grad_warps=max(1, min(16, padded // 512)),
        tail_up=tile,
        tail_down=tile,
    )
    key = tuning.bucket(device or tuning.device_kind(), dtype, tokens, width, features)
    return dataclasses.replace(config, **tuning.measured(MEASURED, key))
