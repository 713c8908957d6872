"""What to say where a mesh does not fit a model: alike lines once, and which sizes would fit."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

# What a dimension counts, by the end of the path and the dimension.
_NAMES = (
    (r"attn/(k|v)$", 1, "KV heads"),
    (r"attn/(k|v)_bias$", 0, "KV heads"),
    (r"attn/q$", 1, "query heads"),
    (r"attn/(o|q_bias)$", 0, "query heads"),
    (r"ffn/(gate|up|down|gate_bias)$", 0, "neurons"),
    (r"embed/embedding$", 0, "vocabulary"),
    (r"lm_head/kernel$", 1, "vocabulary"),
)


@dataclasses.dataclass(frozen=True)
class Split:
    """One dimension of a leaf that the rules split over devices."""

    path: str
    dim: int
    size: int
    axes: str | tuple[str, ...]
    ways: int

    @property
    def what(self) -> str:
        """What the dimension counts; empty where that is not known."""
        names = [n for end, dim, n in _NAMES if dim == self.dim and re.search(end, self.path)]
        return names[0] if names else ""


def misfit(splits: Sequence[Split]) -> str:
    """The error's text; empty where every dimension divides.

    Args:
      splits: every dimension that is split, those that divide too.
    """
    alike: dict[tuple, list[Split]] = {}
    for split in splits:
        if split.size % split.ways:
            # Layers, and the optimiser's moments, have the same leaf many times.
            place = split.what or (re.sub(r"\d+", "", split.path), split.dim)
            alike.setdefault((place, split.size, split.axes), []).append(split)
    if not alike:
        return ""
    lines = ["the mesh does not fit the model:"]
    for first, *more in alike.values():
        what = f"{first.what}: " if first.what else ""
        count = f", and {len(more)} more like it" if more else ""
        lines.append(
            f"  {what}{first.path}: dimension {first.dim} of size {first.size} does not divide "
            f"over {first.axes!r} = {first.ways} devices{count}"
        )
    return "\n".join(lines + _fixes(splits, [group[0] for group in alike.values()]))


def _fixes(splits: Sequence[Split], wrong: Sequence[Split]) -> list[str]:
    fixes = []
    for axis, other in (("tensor", "fsdp"), ("fsdp", "data")):
        if any(split.axes == axis for split in wrong):
            most = math.gcd(*(split.size for split in splits if split.axes == axis))
            fixes.append(
                f"--mesh.{axis} must divide {most} for this model; the other devices can go to "
                f"--mesh.{other}"
            )
    return fixes
