"""Feed-forward parts removed, or left with fewer neurons."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from sparsejax.checks import model_config, numbers, scalar, whole_number
from sparsejax.config import FFNConfig, ModelConfig
from sparsejax.surgery import leaves
from sparsejax.surgery.common import (
    Layers,
    ffn_of,
    layer_indices,
    put_together,
    take_apart,
)
from sparsejax.surgery.neurons import channel_contribution, take_neurons
from sparsejax.types import Params

if TYPE_CHECKING:
    from sparsejax.analysis.activations import ActivationStats


@dataclasses.dataclass(frozen=True)
class PrunedLayer:
    """What `prune_ffn` left of one layer.

    Attributes:
      layer: its index.
      before: neurons before.
      after: neurons after.
      kept: the neurons kept, ascending, in the old numbering; None where params were shapes alone
        and nothing said which.
      score_kept: their share of the layer's summed scores; None without scores.
    """

    layer: int
    before: int
    after: int
    kept: tuple[int, ...] | None
    score_kept: float | None


@dataclasses.dataclass(frozen=True)
class PruneReport:
    """What `prune_ffn` did, a `PrunedLayer` for each layer in the order asked for."""

    layers: tuple[PrunedLayer, ...]

    @property
    def work_removed(self) -> float:
        """Share of these layers' gate projection (the dense part of a sparse layer) that is gone.

        The same share of their parameters is.
        """
        before = sum(layer.before for layer in self.layers)
        return 1 - sum(layer.after for layer in self.layers) / before if before else 0.0


def remove_ffn(config: ModelConfig, params: Params, layers: Layers) -> tuple[ModelConfig, Params]:
    """y = x + attention(norm(x)) for the given layers: their FFN and its norm are dropped.

    No layer changes its number: one that has no attention either stays in its place, holds no
    parameters and does nothing.

    Args:
      config: the model.
      params: its parameters.
      layers: one index or several, each of a layer that has a feed-forward part.

    Returns:
      (config, params).

    Raises:
      ValueError: an unknown layer, one without feed-forward part, or one given twice.
    """
    name = "remove_ffn"
    chosen = layer_indices(name, config, layers)
    for i in chosen:
        ffn_of(name, config, i)
    parts = take_apart(config, params)
    for i in chosen:
        layer, part = parts[i]
        del part["ffn"], part["ffn_norm"]
        parts[i] = dataclasses.replace(layer, ffn=None), part
    return put_together(config, params, parts)


def prune_ffn(
    config: ModelConfig,
    params: Params,
    layers: Layers,
    *,
    keep: Any,
    scores: Any = None,
    multiple: int = 1,
    donate: bool = False,
) -> tuple[ModelConfig, Params, PruneReport]:
    """Rows of gate, up and down (entries of the gate bias) of the kept neurons, in their old order.

    `keep` says which or how many, for all the layers alike, or as {layer: ...} for each:

      an integer: that many neurons, those of the highest `scores` (of equal ones the first);
      a float in (0, 1]: that fraction of the layer's neurons (so 1.0 is all of them and 1 is one);
      a sequence of integers: these neurons.

    A number of neurons is rounded up to the next multiple of `multiple`, and to all of the layer's
    if it has no more; a sequence must be such a multiple already. On a mesh, widths must divide
    over the devices that split the neurons: let `multiple` be a multiple of their number.

    Exact where the neurons dropped are silent, an approximation otherwise.

    Args:
      config: the model.
      params: its parameters, as arrays, sharded arrays, tracers or `jax.ShapeDtypeStruct`s.
      layers: one index or several, each of a layer that has a feed-forward part.
      keep: see above.
      scores: {layer: (F,)}, or (F,) for a single layer; higher stays. `channel_contribution` gives
        them. Needed with numbers of neurons, unless params are shapes alone.
      multiple: what widths are rounded up to.
      donate: free each old leaf as soon as its successor exists. The old tree is unusable then.

    Returns:
      (config, params, report).

    Raises:
      ValueError: an unknown layer or one without feed-forward part, nothing left, more than there
        is, neurons out of range or twice, scores missing, of another shape or not finite, or a
        width that does not divide.

    Source: Puzzle, arXiv 2411.19146 (channel contribution).
    """
    name = "prune_ffn"
    multiple = whole_number(name, "multiple", multiple)
    chosen = layer_indices(name, config, layers)
    keeps = _per_layer("keep", keep, chosen, single=False)
    all_scores = _per_layer("scores", scores, chosen, single=True)
    parts = take_apart(config, params)
    plans: list[PrunedLayer] = []
    for i in chosen:
        ffn = ffn_of(name, config, i)
        score = _score(i, ffn, all_scores[i])
        planless = leaves.is_shape(parts[i][1]["ffn"]["up"])
        plan = _plan(i, ffn, keeps[i], score, multiple, shapes_only=planless)
        for leaf_name, leaf in parts[i][1]["ffn"].items():
            argument, path = f"keep ({plan.after} neurons)", f"layer_{i}/ffn/{leaf_name}"
            leaves.check_divides(name, argument, leaf, path, 0, plan.after)
        plans.append(plan)
    donated = leaves.Donated(name, params, donate)
    for plan in plans:
        layer, part = parts[plan.layer]
        assert layer.ffn is not None
        if plan.after < plan.before:
            kept = np.arange(plan.after) if plan.kept is None else np.asarray(plan.kept)
            part = take_neurons(plan.layer, part, kept, donated)
        new_ffn = dataclasses.replace(layer.ffn, d_ff=plan.after)
        parts[plan.layer] = dataclasses.replace(layer, ffn=new_ffn), part
    return *put_together(config, params, parts), PruneReport(layers=tuple(plans))


def drop_dead_neurons(
    config: ModelConfig,
    params: Params,
    batches: Iterable[Any] | ActivationStats,
    layers: Layers | None = None,
    *,
    multiple: int = 1,
    donate: bool = False,
) -> tuple[ModelConfig, Params, PruneReport]:
    """`prune_ffn` of the neurons that contribute nothing on any token of `batches`.

    With `ActivationStats` these are the neurons that never fired; of batches also those whose row
    of `down` is zero. On these tokens the function is unchanged, to rounding; a neuron that is
    silent there may speak elsewhere. At least `multiple` neurons of each layer stay, dead or not.

    Args:
      config: the model.
      params: its parameters.
      batches: as for `channel_contribution`, or what `sparsejax.analysis.activation_stats` found
        on them, which decides without running the model (params may be shapes).
      layers: one index or several; None for all whose neurons can be silent (ReLU).
      multiple: what widths are rounded up to, with dead neurons.
      donate: free each old leaf as soon as its successor exists. The old tree is unusable then.

    Returns:
      (config, params, report); `report.work_removed` is the share of the gate projection saved.

    Raises:
      ValueError: as `channel_contribution` and `prune_ffn`, or statistics of another model.
    """
    # Analyses stand on surgery.
    from sparsejax.analysis.activations import ActivationStats

    name = "drop_dead_neurons"
    model_config(name, config)
    chosen = layer_indices(name, config, config.sparse_layers if layers is None else layers)
    if isinstance(batches, ActivationStats):
        scores = {i: batches.of_layer(i).fired for i in chosen}
    else:
        scores = channel_contribution(config, params, batches, chosen)
    alive = {i: max(1, int(np.count_nonzero(score))) for i, score in scores.items()}
    return prune_ffn(
        config, params, chosen, keep=alive, scores=scores, multiple=multiple, donate=donate
    )


def _plan(
    layer: int,
    ffn: FFNConfig,
    keep: Any,
    score: np.ndarray | None,
    multiple: int,
    *,
    shapes_only: bool,
) -> PrunedLayer:
    """What stays of one layer, after all checks."""
    keep = scalar(keep)
    if isinstance(keep, Sequence | np.ndarray | jax.Array | range) and not isinstance(keep, str):
        kept = _indices(layer, ffn, keep, multiple)
    else:
        width = _width(layer, ffn, keep, multiple)
        if score is not None:
            kept = np.sort(np.argsort(-score, kind="stable")[:width])
        elif width == ffn.d_ff:
            kept = np.arange(width)
        elif shapes_only:
            return PrunedLayer(layer, ffn.d_ff, width, None, None)
        else:
            raise ValueError(
                f"prune_ffn: scores must say which {width} of layer {layer}'s {ffn.d_ff} neurons "
                "stay; pass scores=channel_contribution(config, params, batches), or a list of "
                "neurons as keep"
            )
    share = None
    if score is not None:
        total = float(np.sum(score))
        share = float(np.sum(score[kept])) / total if total else 1.0
    return PrunedLayer(layer, ffn.d_ff, len(kept), tuple(kept.tolist()), share)


def _width(layer: int, ffn: FFNConfig, keep: Any, multiple: int) -> int:
    if isinstance(keep, bool):
        raise ValueError(f"prune_ffn: keep must be neurons, a number or a fraction, got {keep!r}")
    if isinstance(keep, float):
        if not 0 < keep <= 1:
            raise ValueError(
                f"prune_ffn: keep must be a fraction in (0, 1] or an integer, got {keep!r} for "
                f"layer {layer}; remove_ffn drops a whole feed-forward part"
            )
        # Not 8 neurons for a tenth of 70, which is 7.000000000000001 in floating point.
        width = math.ceil(round(keep * ffn.d_ff, 6))
    else:
        width = whole_number("prune_ffn", f"keep for layer {layer}", keep)
        if width > ffn.d_ff:
            raise ValueError(
                f"prune_ffn: keep must be at most layer {layer}'s d_ff = {ffn.d_ff}, got {width}"
            )
    return min(ffn.d_ff, -(-max(width, 1) // multiple) * multiple)


def _indices(layer: int, ffn: FFNConfig, keep: Any, multiple: int) -> np.ndarray:
    kept = numbers("prune_ffn", f"keep for layer {layer}", keep)
    if kept.ndim != 1 or kept.size == 0:
        raise ValueError(
            f"prune_ffn: keep must list one neuron of layer {layer} or more, got shape "
            f"{list(kept.shape)}; remove_ffn drops a whole feed-forward part"
        )
    if kept.dtype.kind not in "iu":
        raise ValueError(
            f"prune_ffn: keep must list layer {layer}'s neurons as integers, got {kept.dtype}; of "
            "a mask take np.flatnonzero(mask)"
        )
    wrong = kept[(kept < 0) | (kept >= ffn.d_ff)]
    if wrong.size:
        raise ValueError(
            f"prune_ffn: keep must list neurons 0 to {ffn.d_ff - 1} of layer {layer}, got "
            f"{wrong[0]}"
        )
    unique, counts = np.unique(kept, return_counts=True)
    if unique.size < kept.size:
        raise ValueError(
            f"prune_ffn: keep lists neuron {unique[np.argmax(counts)]} of layer {layer} more than "
            "once"
        )
    if kept.size % multiple:
        raise ValueError(
            f"prune_ffn: keep lists {kept.size} neurons of layer {layer}, not a multiple of "
            f"multiple = {multiple}"
        )
    return unique


def _score(layer: int, ffn: FFNConfig, score: Any) -> np.ndarray | None:
    if score is None:
        return None
    score = numbers("prune_ffn", f"scores of layer {layer}", score).astype(np.float64)
    if score.shape != (ffn.d_ff,):
        raise ValueError(
            f"prune_ffn: scores of layer {layer} must have shape [{ffn.d_ff}], got "
            f"{list(score.shape)}"
        )
    if not np.isfinite(score).all():
        raise ValueError(
            f"prune_ffn: scores of layer {layer} must be finite, got "
            f"{score[~np.isfinite(score)][0]} for neuron {np.argmin(np.isfinite(score))}"
        )
    return score


def _per_layer(
    argument: str, value: Any, chosen: tuple[int, ...], *, single: bool
) -> dict[int, Any]:
    """`value` for each layer: from a mapping, or one for all (for at most one if `single`)."""
    if value is None:
        return dict.fromkeys(chosen)
    if isinstance(value, Mapping):
        # Scores may cover more layers than are pruned; a request for others is a mistake.
        absent = [i for i in chosen if i not in value]
        extra = [] if single else [i for i in value if i not in chosen]
        if absent or extra:
            raise ValueError(
                f"prune_ffn: {argument} must hold an entry for each of layers {list(chosen)}; "
                + (f"{absent} are missing" if absent else f"{extra} are not among them")
            )
        return {i: value[i] for i in chosen}
    if single and len(chosen) > 1:
        raise ValueError(
            f"prune_ffn: {argument} must be a dict of layers {list(chosen)}, got "
            f"{type(value).__name__}"
        )
    return dict.fromkeys(chosen, value)
