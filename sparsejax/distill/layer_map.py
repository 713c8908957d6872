"""Which teacher layer each student layer is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sparsejax.config import LayerConfig, ModelConfig
from sparsejax.surgery import FusionReport

LayerMap = tuple[int | None, ...]
"""One entry per student layer: the teacher layer whose output corresponds to its own, or None.

Numbers ascend, and the last layer of the student stands for the last one of the teacher. A fused
layer stands for its whole run, so its output corresponds to that of the run's last layer.
"""


def layer_map_of(*reports: FusionReport) -> LayerMap:
    """The map through several fusions, in the order in which they were made.

    Other surgery leaves the numbers of layers alone (`remove_attention`, `prune_ffn`, ...), so the
    reports of `plan_fusion` say all there is to say.

    Args:
      reports: one or more; each describes layers in the numbers that the one before left.

    Raises:
      ValueError: none given, or two that do not follow each other.
    """
    if not reports:
        raise ValueError("layer_map_of: pass the report of plan_fusion, or of several in order")
    before = range(len(reports[0].old_to_new))
    for k, report in enumerate(reports):
        if len(report.old_to_new) != len(before):
            raise ValueError(
                f"layer_map_of: report {k} starts from {len(report.old_to_new)} layers, the one "
                f"before it leaves {len(before)}"
            )
        before = [before[run[-1]] for run in report.new_to_old]
    return tuple(before)


def derive_layer_map(teacher: ModelConfig, student: ModelConfig) -> LayerMap:
    """The map found by comparing the two configs: only where they leave one possibility.

    A student layer stands for one teacher layer that it can have been made of (no attention that
    the teacher lacks, a feed-forward part that is not wider), or, without attention, for a run of
    them whose widths add up to its own.

    Raises:
      ValueError: no way, or more than one, to lay the student's layers on the teacher's.
    """
    if student.num_layers == teacher.num_layers:
        return tuple(range(teacher.num_layers))
    # ways[t]: how the student's layers so far can stand for teacher layers 0..t-1; at most two.
    ways: dict[int, list[tuple[int, ...]]] = {0: [()]}
    for layer in student.layers:
        following: dict[int, list[tuple[int, ...]]] = {}
        for start, found in ways.items():
            for end in _ends(layer, teacher.layers, start):
                extended = [(*way, end - 1) for way in found]
                following[end] = (following.get(end, []) + extended)[:2]
        ways = following
    found = ways.get(teacher.num_layers, [])
    if len(found) == 1:
        return found[0]
    told = f" (for example {list(found[0])} and {list(found[1])})" if found else ""
    raise ValueError(
        f"layer_map: the student's {student.num_layers} layers can stand for the teacher's "
        f"{teacher.num_layers} in {'more than one way' if found else 'no way'}{told}; pass the "
        "teacher layer of each student layer, or that a fusion's report gives (layer_map_of)"
    )


def check_layer_map(
    teacher: ModelConfig, student: ModelConfig, layer_map: Sequence[int | None]
) -> LayerMap:
    """`layer_map` as a tuple, if it fits both models.

    Raises:
      ValueError: another number of entries than student layers, an unknown teacher layer, numbers
        that do not ascend, or an end that is not the teacher's.
    """
    checked = tuple(layer_map)
    if len(checked) != student.num_layers:
        raise ValueError(
            f"layer_map must have an entry for each of the student's {student.num_layers} layers, "
            f"got {len(checked)}: {list(checked)}"
        )
    known = [t for t in checked if t is not None]
    for t in known:
        if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < teacher.num_layers:
            raise ValueError(
                f"layer_map must hold teacher layers 0 to {teacher.num_layers - 1}, or None, got "
                f"{t!r}"
            )
    if any(a >= b for a, b in itertools.pairwise(known)):
        raise ValueError(f"layer_map must ascend, got {list(checked)}")
    if checked and checked[-1] != teacher.num_layers - 1:
        raise ValueError(
            "layer_map must end with the teacher's last layer "
            f"{teacher.num_layers - 1}, which the head reads, got {checked[-1]}"
        )
    return checked


def _ends(layer: LayerConfig, teacher: tuple[LayerConfig, ...], start: int) -> list[int]:
    """Where a run of teacher layers from `start` can end (exclusive) that became `layer`."""
    ends = []
    if start < len(teacher) and _can_become(teacher[start], layer):
        ends.append(start + 1)
    if layer.attention is None and layer.ffn is not None:
        width = 0
        for end in range(start + 1, len(teacher) + 1):
            ffn = teacher[end - 1].ffn
            width += ffn.d_ff if ffn else 0
            if width == layer.ffn.d_ff and end > start + 1:
                ends.append(end)
    return ends


def _can_become(old: LayerConfig, new: LayerConfig) -> bool:
    if new.attention is not None and old.attention is None:
        return False
    return new.ffn is None or (old.ffn is not None and new.ffn.d_ff <= old.ffn.d_ff)
