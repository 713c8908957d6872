"""Which layers to fuse, and which to run side by side, from the dependency matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sparsejax import surgery
from sparsejax.analysis.cost import ffn_bytes
from sparsejax.analysis.dependency import Dependency
from sparsejax.checks import model_config, numbers, real_number, whole_number
from sparsejax.config import FFNConfig, ModelConfig


def fusion_groups(
    config: ModelConfig,
    dependency: Dependency | np.ndarray | None = None,
    *,
    threshold: float | None = None,
    keep_last: bool = True,
    max_bytes: float | None = None,
    tensor: int = 1,
) -> list[tuple[int, ...]]:
    """Groups for `surgery.fuse_ffns`: runs of attention-free layers, cut where they must be.

    A run is as many consecutive layers without attention as there are, of one kind (gated or not,
    one activation). Of each run the last layer stays out, which is unusually sensitive (published
    choice); the rest is cut from the left into the fewest groups such that, where asked for,

      the dependency M[i, j] of any two layers i < j of a group is at most `threshold`;
      the fused layer takes at most `max_bytes` on each of `tensor` devices.

    Layers that are left alone by that are in no group. There is no published threshold: plot the
    matrix (`plots.plot_dependency`) and see where the blue squares end.

    Args:
      config: the model, attention removed already.
      dependency: of a model with as many layers, with part "block" or "ffn"; None for any.
      threshold: see above; goes with `dependency`. A pair that was not measured (NaN) is too much,
        but for layers without feed-forward part, which add nothing.
      keep_last: leave the last layer with a feed-forward part out of each run.
      max_bytes: see above, in `config.param_dtype`; None for no bound.
      tensor: devices that share a layer.

    Returns:
      Groups of two feed-forward layers or more, in order; an empty list if there are none.

    Raises:
      ValueError: a threshold without matrix or the other way round, a matrix of another model, or a
        bound that not even the smallest feed-forward part keeps to.

    Source: FFN Fusion, arXiv 2503.18908.
    """
    name = "fusion_groups"
    if (dependency is None) != (threshold is None):
        raise ValueError(
            f"{name}: dependency and threshold go together; pass both, or neither to take whole "
            "attention-free runs"
        )
    model_config(name, config)
    if threshold is not None:
        threshold = real_number(name, "threshold", threshold, "a distance from 0 on")
        if not 0 <= threshold < math.inf:
            raise ValueError(f"{name}: threshold must be a distance from 0 on, got {threshold!r}")
    tensor = whole_number(name, "tensor", tensor)
    if max_bytes is not None:
        max_bytes = real_number(name, "max_bytes", max_bytes, "a number of bytes, or None")
    matrix = None if dependency is None else _matrix(name, config, dependency)
    runs = [run for run in _runs(config) if len(_with_ffn(config, run)) > 1]
    if max_bytes is not None and runs:
        sizes = {i: ffn_bytes(config, i, tensor=tensor) for run in runs for i in run}
        smallest = min((i for i in sizes if config.layers[i].ffn), key=lambda i: sizes[i])
        if not max_bytes >= sizes[smallest]:
            raise ValueError(
                f"{name}: max_bytes = {max_bytes:g} is less than the smallest feed-forward part "
                f"takes by itself, {sizes[smallest]:g} bytes in layer {smallest} on each of "
                f"{tensor} devices; raise max_bytes or tensor"
            )
    groups: list[tuple[int, ...]] = []
    for run in runs:
        if keep_last:
            run = run[: run.index(_with_ffn(config, run)[-1])]
        group: list[int] = []
        for i in run:
            if group and not _fits(config, [*group, i], matrix, threshold, max_bytes, tensor):
                groups.append(tuple(group))
                group = []
            group.append(i)
        groups.append(tuple(group))
    groups = [_trimmed(config, group) for group in groups]
    groups = [group for group in groups if len(_with_ffn(config, group)) > 1]
    surgery.plan_fusion(config, groups)
    return groups


def parallel_windows(
    dependency: Dependency | np.ndarray,
    config: ModelConfig,
    length: int = 4,
    count: int | None = None,
) -> list[tuple[int, ...]]:
    """Windows for `surgery.parallelize_blocks`, those that depend least on themselves first.

    Of all windows of `length` consecutive layers the one with the smallest largest entry of M
    within, among equal ones that with the smallest sum; then windows that overlap with it are out,
    and again. Windows with a layer without attention are no candidates (`fusion_groups` takes
    those), nor are windows that touch layers already parallel, or pairs not measured (NaN).

    Args:
      dependency: M, from `block_dependency` with part="block".
      config: the model it belongs to.
      length: layers per window.
      count: how many windows at most; None for as many as there are. The published choice has no
        threshold: add windows while quality lasts.

    Returns:
      Windows in the order chosen.

    Raises:
      ValueError: a matrix of another model or part, or numbers that are not positive (length 2 at
        least).

    Source: FFN Fusion, arXiv 2503.18908, section on block parallelisation.
    """
    name = "parallel_windows"
    model_config(name, config)
    length = whole_number(name, "length", length, least=2)
    count = None if count is None else whole_number(name, "count", count)
    if isinstance(dependency, Dependency) and dependency.part != "block":
        raise ValueError(
            f"{name}: dependency must be of whole blocks, part='block', got {dependency.part!r}"
        )
    matrix = _matrix(name, config, dependency)
    layers = config.layers
    upper = np.triu_indices(length, 1)
    candidates: list[tuple[float, float, int]] = []
    for start in range(config.num_layers - length + 1):
        stop = start + length
        if any(layer.attention is None for layer in layers[start:stop]):
            continue
        if any(layer.parallel_with_previous for layer in layers[start : stop + 1]):
            continue
        values = matrix[start:stop, start:stop][upper]
        if np.isfinite(values).all():
            candidates.append((float(values.max()), float(values.sum()), start))
    chosen: list[int] = []
    for _, _, start in sorted(candidates):
        if all(abs(start - other) >= length for other in chosen):
            chosen.append(start)
    return [tuple(range(start, start + length)) for start in chosen[:count]]


def _matrix(name: str, config: ModelConfig, dependency: Dependency | np.ndarray) -> np.ndarray:
    if isinstance(dependency, Dependency):
        if dependency.part == "attention":
            raise ValueError(
                f"{name}: dependency says how attentions depend on each other; take "
                "block_dependency with part='block' or 'ffn'"
            )
        dependency = dependency.matrix
    matrix = numbers(name, "dependency", dependency).astype(np.float64)
    m = config.num_layers
    if matrix.shape != (m, m):
        raise ValueError(
            f"{name}: dependency must have shape [{m}, {m}] for this model's {m} layers, got "
            f"{list(matrix.shape)}"
        )
    return matrix


def _runs(config: ModelConfig) -> list[tuple[int, ...]]:
    """Maximal runs of consecutive attention-free layers of one kind, each with an FFN in it."""
    runs: list[list[int]] = [[]]
    kind = None
    for i, layer in enumerate(config.layers):
        mine = _kind(layer.ffn) or kind
        if layer.attention is not None or (kind is not None and mine != kind):
            runs.append([])
            kind, mine = None, _kind(layer.ffn)
        if layer.attention is None:
            runs[-1].append(i)
            kind = mine
    return [tuple(run) for run in runs if _with_ffn(config, run)]


def _kind(ffn: FFNConfig | None) -> tuple[bool, str] | None:
    return None if ffn is None else (ffn.gated, ffn.activation)


def _with_ffn(config: ModelConfig, layers: Sequence[int]) -> list[int]:
    return [i for i in layers if config.layers[i].ffn is not None]


def _trimmed(config: ModelConfig, group: tuple[int, ...]) -> tuple[int, ...]:
    """Without layers at either end that add nothing."""
    found = _with_ffn(config, group)
    return tuple(range(found[0], found[-1] + 1)) if found else ()


def _fits(
    config: ModelConfig,
    group: list[int],
    matrix: np.ndarray | None,
    threshold: float | None,
    max_bytes: float | None,
    tensor: int,
) -> bool:
    members = _with_ffn(config, group)
    size = sum(ffn_bytes(config, i, tensor=tensor) for i in members)
    if max_bytes is not None and size > max_bytes:
        return False
    if matrix is not None and threshold is not None:
        values = matrix[np.ix_(members, members)][np.triu_indices(len(members), 1)]
        # A comparison with NaN is false: not measured is not independent.
        return bool((values <= threshold).all())
    return True
