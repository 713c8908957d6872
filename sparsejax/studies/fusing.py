"""A run of layers to free of attention, and the ways to make it shallower."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sparsejax import surgery
from sparsejax.config import ModelConfig
from sparsejax.distill.layer_map import LayerMap, layer_map_of
from sparsejax.surgery.fuse import Norm
from sparsejax.types import Params


@dataclasses.dataclass(frozen=True)
class Change:
    """A changed model.

    Attributes:
      name: such as "fuse 4".
      family: "fuse", "fuse, last layer in", "fuse, own norms", "remove" or "reverse".
      groups: layers that were fused, reordered or removed together, in the numbers before.
      saved: feed-forward steps fewer than before.
      config: the model.
      params: its parameters.
      layer_map: the old layer of each new one.
    """

    name: str
    family: str
    groups: tuple[tuple[int, ...], ...]
    saved: int
    config: ModelConfig
    params: Params
    layer_map: LayerMap

    @property
    def where(self) -> str:
        """The groups, such as "3-6 7-10"; of layers removed, their numbers."""
        if self.family == "remove":
            return " ".join(map(str, self.groups[0]))
        return " ".join(f"{group[0]}-{group[-1]}" for group in self.groups)

    @property
    def beside(self) -> int:
        """Steps saved, for a reversal those of the fusion that it stands beside."""
        if self.family == "reverse":
            return sum(len(group) - 1 for group in self.groups)
        return self.saved


def best_window(losses: Sequence[float] | np.ndarray, length: int) -> tuple[int, ...]:
    """The `length` consecutive layers whose losses have the least sum; the first of equal ones.

    Raises:
      ValueError: more layers than there are.
    """
    values = np.asarray(losses, np.float64)
    if not 1 <= length <= len(values):
        raise ValueError(
            f"best_window: length must be from 1 to the {len(values)} layers, got {length}"
        )
    sums = np.convolve(values, np.ones(length), "valid")
    start = int(np.argmin(sums))
    return tuple(range(start, start + length))


def cut_into(layers: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """`layers` in groups of `size` from the left; what is left over, if single, in none."""
    groups = [tuple(layers[k : k + size]) for k in range(0, len(layers), size)]
    return tuple(group for group in groups if len(group) > 1)


def changes(
    config: ModelConfig,
    params: Params,
    window: Sequence[int],
    ffn_losses: Mapping[int, float],
    sizes: Sequence[int] = (2, 4, 8),
) -> Iterator[Change]:
    """Every way in which the feed-forward layers of `window` are made fewer, or reordered.

    Args:
      config: the model; no layer of `window` has attention.
      params: its parameters.
      window: consecutive layers, all alike.
      ffn_losses: what the model loses without the feed-forward part of each; the cheapest go first
        where layers are removed.
      sizes: layers per group; "all" is the whole window in one group, the last layer too.

    Yields:
      One model at a time: groups of each size without the window's last layer (the published
      choice), with it but without the first, with every layer's own norm, reversed in place; and as
      many layers removed as each size saves steps.
    """
    inner, shifted = tuple(window[:-1]), tuple(window[1:])
    fits = [size for size in sizes if 1 < size <= len(inner)]
    saved: set[int] = set()
    for size in fits:
        plain = cut_into(inner, size)
        fused = _fuse(config, params, f"fuse {size}", "fuse", plain)
        saved.add(fused.saved)
        yield fused
        yield _fuse(config, params, f"fuse {size}", "fuse, last layer in", cut_into(shifted, size))
        yield _fuse(config, params, f"fuse {size}", "fuse, own norms", plain, norm="fold")
        yield reverse(config, params, f"reverse {size}", plain)
    whole = (tuple(window),)
    fused = _fuse(config, params, "fuse all", "fuse", whole)
    saved.add(fused.saved)
    yield fused
    yield _fuse(config, params, "fuse all", "fuse, own norms", whole, norm="fold")
    yield reverse(config, params, "reverse all", whole)
    cheapest = sorted(window, key=lambda i: ffn_losses[i])
    for count in sorted(saved):
        gone = tuple(sorted(cheapest[:count]))
        removed = surgery.remove_ffn(config, params, gone)
        same = tuple(range(config.num_layers))
        yield Change(f"remove {count}", "remove", (gone,), count, *removed, same)


def reverse(
    config: ModelConfig, params: Params, name: str, groups: Sequence[Sequence[int]]
) -> Change:
    """The model whose layers stand in the opposite order within each group.

    Raises:
      ValueError: layers of a group differ.
    """
    new = dict(params)
    for group in groups:
        kinds = {config.layers[i] for i in group}
        if len(kinds) > 1:
            raise ValueError(f"reverse: layers {list(group)} differ, and cannot change places")
        for i, j in zip(group, reversed(group), strict=True):
            new[f"layer_{i}"] = params[f"layer_{j}"]
    kept = tuple(tuple(group) for group in groups)
    same = tuple(range(config.num_layers))
    return Change(name, "reverse", kept, 0, config, new, same)


def _fuse(config, params, name: str, family: str, groups, norm: Norm = "last"):
    fused = surgery.fuse_ffns(config, params, groups, norm)
    _, report = surgery.plan_fusion(config, groups)
    saved = sum(len(group) - 1 for group in groups)
    return Change(name, family, groups, saved, *fused, layer_map_of(report))
