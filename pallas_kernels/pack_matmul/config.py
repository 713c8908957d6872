"""Launch configurations of `pack_matmul`'s `"triton"` engine."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pallas_kernels import tuning


@dataclasses.dataclass(frozen=True)
class PackConfig:
    """How the engine is launched.

    Attributes:
      method: "bits" (mask and values, expanded by a second kernel) or "direct" (TwELL entries from
        the epilogue). "bits" is the faster one wherever both were measured: 0.64 against 0.82 ms
        at 16,384 x 2048 x 5632, 30 active, one H200, jax 0.11.2.
      tile: the matmul's tile; with "direct" its columns are TwELL's tile whatever is set here.
    """

    method: Literal["bits", "direct"] = "bits"
    tile: tuning.MatmulTile = tuning.HOPPER_TILE


def default(itemsize: int) -> PackConfig:
    """The configuration for operands of this size; float32 takes a smaller tile."""
    return PackConfig(tile=tuning.matmul_tile(itemsize))
