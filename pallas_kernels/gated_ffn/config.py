"""Launch configurations of the `"triton"` engine of `gated_ffn`, and the rule that picks one."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pallas_kernels import tuning


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
        more than 4 tokens.
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
    choice: Literal["auto", "sparse", "hot", "dense"] = "auto"
    choose_tokens: int = 2048
    hot_neurons: int = 128
    residuals: Literal["compact", "full"] = "compact"
    grad_hidden_unroll: int = 4
    grad_hidden_warps: int = 1
    grad_warps: int = 4
    grad_unroll: int = 2
    grad_segment: int = 512
    grad_unroll_weights: int = 4
    grad_rows: int = 512


def default(width: int, features: int, itemsize: int) -> FFNConfig:
    """The configuration for weights (features, width): measured where known, else scaled from it.

    Measured on one H200, jax 0.11.2, bf16, 16,384 tokens, D = 2048, F = 5632 (notes_ffn.md): walk
    with 2 / 4 warps 0.311 / 0.292 ms at 15 active neurons, 0.507 / 0.517 at 30, 0.940 / 0.972 at
    60 (1 warp: 0.332 / 0.529 / 0.994, 8 warps: 0.344 / 0.592 / 1.104). One warp holds 512 to 1,024
    columns of x and of the result in registers, hence the rule for other widths. Backward, at 30
    and 60: hidden gradients with 1 / 2 / 4 warps of 4 entries 0.30 / 0.33 / 0.36 and 0.55 / 0.63 /
    0.65 (launch included); dx the same with 2 and 4 warps; weight gradients with 256 columns in one
    warp 0.61 and 1.13, with 512 in one or two 0.63 to 0.67 and 1.16, with 1,024 and more from 0.77.
    Hot neurons, training, power law, 30 and 60: at most 64 / 128 / 256 of them 2.42 / 2.28 / 2.43
    and 3.60 / 3.28 / 3.17.
    """
    padded = 1 << (width - 1).bit_length()
    walk_warps = min(16, max(1, 1 << max(0, (width - 1) // 768).bit_length()))
    tile = tuning.matmul_tile(itemsize)
    return FFNConfig(
        walk_warps=walk_warps,
        grad_hidden_warps=max(1, padded // 2048),
        grad_warps=max(1, min(16, padded // 512)),
        tail_up=tile,
        tail_down=tile,
    )
