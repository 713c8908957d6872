"""What to remove, narrow and fuse so that a model meets its limits at the least loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sparsejax import surgery
from sparsejax.analysis import (
    BlockScores,
    Choice,
    Dependency,
    Selection,
    apply_selection,
    fusion_groups,
    select_architecture,
)
from sparsejax.analysis.cost import estimate, layer_costs
from sparsejax.config import ModelConfig
from sparsejax.distill.layer_map import LayerMap, layer_map_of
from sparsejax.params import param_shapes

LIMITED = ("latency", "kv_cache", "memory", "parameters")


@dataclasses.dataclass(frozen=True)
class Fusing:
    """How runs of attention-free layers are fused.

    Attributes:
      fuse: whether they are at all.
      fuse_norm: "last" (the published rule) or "fold" (every layer keeps its own).
      fuse_threshold: largest dependency between two layers of a group; None takes whole runs.
      fuse_last: also fuse the last layer of a run, which is unusually sensitive.
      fuse_bytes: most bytes of a fused layer on each device; None for no bound.
    """

    fuse: bool = True
    fuse_norm: str = "last"
    fuse_threshold: float | None = None
    fuse_last: bool = False
    fuse_bytes: float | None = None

    def __post_init__(self):
        if self.fuse_norm not in ("last", "fold"):
            raise ValueError(f"fuse_norm must be 'last' or 'fold', got {self.fuse_norm!r}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A new architecture, as far as shapes tell.

    Attributes:
      selection: what each layer becomes, before fusing.
      groups: layers that are fused.
      config: the result.
      layer_map: the old layer of each new one, for distillation.
      ratios: modelled costs of the result over those of the model.
    """

    selection: Selection
    groups: tuple[tuple[int, ...], ...]
    config: ModelConfig
    layer_map: LayerMap
    ratios: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; the contributions by which neurons stay are not in it."""
        return {
            "choices": [list(choice) for choice in self.selection.choices],
            "score": self.selection.score,
            "groups": [list(group) for group in self.groups],
            "layer_map": list(self.layer_map),
            "ratios": self.ratios,
            "config": self.config.to_dict(),
        }


def make_plan(
    config: ModelConfig,
    scores: BlockScores,
    targets: Mapping[str, float],
    *,
    dependency: Dependency | None = None,
    fusing: Fusing = Fusing(),
    tensor: int = 1,
    rounds: int = 12,
    **setting: Any,
) -> Plan:
    """The choices of least summed score whose *fused* model keeps every target.

    Fusing makes a model faster than the sum of its layers, which is all that
    `select_architecture` can limit. So the limit on its latency is bisected between the target and
    no limit: of the selections whose fused form is fast enough, the loosest is taken. A target that
    only fusing reaches is searched from the cheapest selection on.

    Args:
      config: the model that was scored.
      scores: what `block_scores` gives.
      targets: {name: share of the model's own cost}, names in `LIMITED`; 0.67 for two thirds.
      dependency: what `block_dependency` gives; needed with a threshold.
      fusing: how attention-free runs are fused.
      tensor: devices that share a layer.
      rounds: bisections.
      setting: device, batch, context, dtype, ... for `cost.estimate`.

    Raises:
      ValueError: unknown or impossible targets, or limits that nothing keeps to (says by how much).
    """
    unknown = [name for name in targets if name not in LIMITED]
    if unknown or not targets:
        raise ValueError(
            f"targets must name one or more of {list(LIMITED)}, got {unknown or 'none at all'}"
        )
    for name, share in targets.items():
        if not 0 < share <= 1:
            raise ValueError(f"the target for {name} must be a share in (0, 1], got {share}")
    if fusing.fuse_threshold is not None and dependency is None:
        raise ValueError("fuse_threshold needs the dependency matrix")
    setting = {**setting, "tensor": tensor}
    before = estimate(config, **setting)
    costs = layer_costs(config, scores.choices(), **setting)
    limits = {name: share * getattr(before, name) for name, share in targets.items()}

    def plan(latency: float | None) -> Plan:
        asked = limits if latency is None else limits | {"latency": latency}
        selection = select_architecture(scores, costs, asked)
        return _fused(config, selection, before, dependency, fusing, tensor, setting)

    if "latency" not in targets or not fusing.fuse:
        return plan(None)
    choices = range(config.num_layers)
    least = costs.fixed["latency"] + sum(min(costs.layers["latency"][i].values()) for i in choices)
    # Fused, a selection may reach what no sum of layers does.
    low, high = max(limits["latency"], least * (1 + 1e-9)), before.latency
    best = plan(low)
    if best.ratios["latency"] > targets["latency"]:
        raise ValueError(
            f"limits cannot be kept: with every layer at its cheapest latency is "
            f"{least / before.latency:.3f} of the model's own, and {best.ratios['latency']:.3f} "
            f"after fusing; {targets['latency']} was asked for"
        )
    for _ in range(rounds):
        middle = (low + high) / 2
        found = plan(middle)
        if found.ratios["latency"] <= targets["latency"]:
            best, low = found, middle
        else:
            high = middle
    return best


def _fused(
    config: ModelConfig,
    selection: Selection,
    before: Any,
    dependency: Dependency | None,
    fusing: Fusing,
    tensor: int,
    setting: dict[str, Any],
) -> Plan:
    shapes_only = dataclasses.replace(selection, contributions=None)
    selected, _ = apply_selection(config, param_shapes(config), shapes_only)
    groups: tuple[tuple[int, ...], ...] = ()
    if fusing.fuse:
        matrix = dependency if fusing.fuse_threshold is not None else None
        found = fusion_groups(
            selected,
            matrix,
            threshold=fusing.fuse_threshold,
            keep_last=not fusing.fuse_last,
            max_bytes=fusing.fuse_bytes,
            tensor=tensor,
        )
        groups = tuple(found)
    after, report = surgery.plan_fusion(selected, groups)
    now = estimate(after, **setting)
    ratios = {
        name: getattr(now, name) / getattr(before, name) if getattr(before, name) else 1.0
        for name in LIMITED
    }
    return Plan(selection, groups, after, layer_map_of(report), ratios)


def read_selection(choices: list[list[Any]], scores: BlockScores) -> Selection:
    """The part of a `Plan.to_dict()` that `apply_selection` needs."""
    chosen = tuple(Choice(bool(attention), int(d_ff)) for attention, d_ff in choices)
    return Selection(
        choices=chosen,
        score=float("nan"),
        totals={},
        limits={},
        added=(),
        contributions=scores.contributions,
    )
