"""Launch settings: tables of what was measured, and tiles that fit the device's shared memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

# Bytes of shared memory one program may ask for, by compute capability (CUDA programming guide).
SHARED_MEMORY_LIMITS = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}


def compute_capability() -> int:
    """The default device's, times ten (90 for Hopper, and where there is no CUDA device to ask)."""
    text = str(getattr(jax.devices()[0], "compute_capability", "9.0")).replace(".", "")
    return int(text) if text.isdigit() else 90


def shared_memory_limit() -> int:
    """The default device's limit in bytes; Hopper's where there is no CUDA device to ask."""
    capability = compute_capability()
    known = [limit for least, limit in SHARED_MEMORY_LIMITS.items() if least <= capability]
    return known[-1] if known else min(SHARED_MEMORY_LIMITS.values())


class Bucket(NamedTuple):
    """What a measurement holds for: a device, a dtype, and sizes to the nearest power of two."""

    device: str
    dtype: str
    tokens: int
    width: int
    features: int


def bucket(device: str, dtype: Any, tokens: int, width: int, features: int) -> Bucket:
    """The bucket of a call; sizes round to the nearest power of two on a logarithmic scale."""
    near = (1 << round(math.log2(max(1, size))) for size in (tokens, width, features))
    return Bucket(device, str(jax.numpy.dtype(dtype)), *near)


def device_kind() -> str:
    """Name of the default device, such as "NVIDIA H200"."""
    return str(jax.devices()[0].device_kind)


def measured(table: Mapping[Bucket, Mapping[str, Any]], key: Bucket) -> Mapping[str, Any]:
    """Settings measured for a bucket; for other token counts of the same layer, the nearest's."""
    same = [b for b in table if b._replace(tokens=0) == key._replace(tokens=0)]
    if not same:
        return {}
    return table[min(same, key=lambda b: abs(math.log2(b.tokens / key.tokens)))]


@dataclasses.dataclass(frozen=True)
class MatmulTile:
    """One program's share of a matmul: (rows, columns) of the output, `depth` per pipeline step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int

    def __post_init__(self):
        for name in ("rows", "columns", "depth", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"MatmulTile: {name} must be a power of two, got {value}")

    def shared_memory(self, itemsize: int) -> int:
        """Bytes asked for: operand tiles of every stage, or the result on its way out."""
        operands = self.stages * (self.rows + self.columns) * self.depth * itemsize
        return max(operands, self.rows * self.columns * itemsize)

    def fit(self, itemsize: int, limit: int | None = None) -> MatmulTile:
        """This tile, or the nearest smaller one that stays inside the shared-memory limit.

        A request over the limit would compile for a long time and then fail, so it is not tried:
        stages go first (down to 2), then the wider side is halved.
        """
        limit = shared_memory_limit() if limit is None else limit
        tile = self
        while tile.shared_memory(itemsize) > limit:
            if tile.stages > 2:
                tile = dataclasses.replace(tile, stages=tile.stages - 1)
            elif tile.columns >= tile.rows and tile.columns > 16:
                tile = dataclasses.replace(tile, columns=tile.columns // 2)
            elif tile.rows > 16:
                tile = dataclasses.replace(tile, rows=tile.rows // 2)
            else:
                raise ValueError(f"no tile fits {limit} bytes of shared memory, smallest: {tile}")
        return tile


# 128 x 256 x 64 in 8 warps and 3 stages beat 256 x 128, 128 x 128, depth 128 and 16 warps for the
# gate matmul at 16,384 x 2048 x 5632 (0.55 ms against 0.61 to 0.77; one H200, jax 0.11.2, bf16).
HOPPER_TILE = MatmulTile(128, 256, 64, warps=8, stages=3, group=8)
# float32 dots run on the ordinary cores and keep their operands in registers.
FLOAT32_TILE = MatmulTile(64, 64, 32, warps=4, stages=2, group=8)


def matmul_tile(itemsize: int) -> MatmulTile:
    """The tile for operands of this size in bytes, made to fit the device's shared memory."""
    return (HOPPER_TILE if itemsize <= 2 else FLOAT32_TILE).fit(itemsize)
