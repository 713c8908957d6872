"""One variant per layer, such that what is lost is least and the limits are kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsejax import surgery
from sparsejax.analysis.choices import Choice, choice_of
from sparsejax.analysis.cost import LayerCosts
from sparsejax.analysis.programme import Programme
from sparsejax.analysis.scores import BlockScores, full_grid
from sparsejax.checks import model_config, real_number, whole_number
from sparsejax.config import ModelConfig
from sparsejax.types import Params

_NAME = "select_architecture"
Scores = Mapping[int, Mapping[Choice, float]]


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """Result of `select_architecture`.

    Attributes:
      choices: what each layer becomes.
      score: the sum of the scores.
      totals: {name: cost of the whole model}, of every cost known.
      limits: what was asked for.
      added: layers whose score is a sum: attention and feed-forward part were measured one by one.
      contributions: {layer: (F,)} by which neurons stay, None if none were given.
    """

    choices: tuple[Choice, ...]
    score: float
    totals: dict[str, float]
    limits: dict[str, float]
    added: tuple[int, ...]
    contributions: Mapping[int, np.ndarray] | None = dataclasses.field(default=None, repr=False)


def select_architecture(
    scores: BlockScores | Scores,
    costs: LayerCosts,
    limits: Mapping[str, float],
    *,
    combine: bool = True,
) -> Selection:
    """argmin over choices c_i of sum_i score_i(c_i) such that every limited total cost fits.

    Solved exactly, as an integer programme (HiGHS): one variable per choice of each layer, or of
    each group of layers that are alike. Totals keep to the limits as computed in float64, and sums
    of scores (above each layer's least) are told apart from a relative difference of 1e-10 on,
    however large the scores of choices that are not taken. Scores of single layers are summed,
    which ignores that layers changed together may lose more or less.

    Args:
      scores: what `block_scores` gives, or {layer: {Choice: score}}; layers 0, 1, ... m - 1. An
        infinite score means never.
      costs: what `cost.layer_costs` gives, or measured numbers in its place.
      limits: {name: most}, names in `costs`: "latency" and "prefill_latency" in seconds, "memory"
        (each device) and "kv_cache" in bytes, "parameters".
      combine: also offer pairs of a kind of attention and a width that were not scored together,
        at the sum of their scores.

    Returns:
      Selection, for `apply_selection`.

    Raises:
      ValueError: limits that nothing keeps to (says which, and by how much), unknown names, costs
        missing, or numbers that are not finite (but for infinite scores).

    Source: mixed-integer search of Puzzle, arXiv 2411.19146.
    """
    table = scores.kl if isinstance(scores, BlockScores) else scores
    offered, sums = _offered(table, combine)
    if not isinstance(limits, Mapping):
        raise ValueError(f"{_NAME}: limits must be a dict of {{name: most}}, got {limits!r}")
    limits = {n: real_number(_NAME, f"limits[{n!r}]", most) for n, most in limits.items()}
    _check_costs(offered, costs, limits)
    keys = [(i, c) for i, found in offered.items() for c in found]
    objective = np.array([offered[i][c] for i, c in keys])
    rows = {name: np.array([costs.layers[name][i][c] for i, c in keys]) for name in limits}
    room = {name: limits[name] - costs.fixed[name] for name in limits}
    programme = Programme(keys, rows, room, lambda cs: _over(cs, costs, limits))
    found = programme.solve(objective)
    if found is None:
        raise ValueError(_infeasible(keys, rows, costs, limits))
    names = [n for n, table in costs.layers.items() if all(c in table[i] for i, c in found.items())]
    choices = tuple(found[i] for i in offered)
    return Selection(
        choices=choices,
        score=math.fsum(offered[i][c] for i, c in found.items()),
        totals={name: costs.total(name, choices) for name in names},
        limits=dict(limits),
        added=tuple(i for i, c in found.items() if (i, c) in sums),
        contributions=scores.contributions if isinstance(scores, BlockScores) else None,
    )


def apply_selection(
    config: ModelConfig, params: Params, selection: Selection, *, donate: bool = False
) -> tuple[ModelConfig, Params]:
    """The model in which each layer is what was selected, by `sparsejax.surgery`.

    Args:
      config: the model that was scored.
      params: its parameters, as arrays, sharded arrays or `jax.ShapeDtypeStruct`s.
      selection: what `select_architecture` gives.
      donate: free each old leaf that is narrowed as soon as its successor exists.

    Returns:
      (config, params); no layer changes its number.

    Raises:
      ValueError: a selection for another model, or narrow layers without contributions.
    """
    model_config("apply_selection", config)
    now = [choice_of(layer) for layer in config.layers]
    chosen = selection.choices
    if len(chosen) != len(now):
        raise ValueError(
            f"apply_selection: selection is for {len(chosen)} layers, and the model has {len(now)}"
        )
    for i, (old, new) in enumerate(zip(now, chosen, strict=True)):
        if (new.attention and not old.attention) or new.d_ff > old.d_ff:
            raise ValueError(
                f"apply_selection: layer {i} is {old} and cannot become {new}; the selection is "
                "for another model"
            )
    changes = list(enumerate(zip(now, chosen, strict=True)))
    no_attention = [i for i, (old, new) in changes if old.attention and not new.attention]
    no_ffn = [i for i, (old, new) in changes if old.d_ff and not new.d_ff]
    widths = {i: new.d_ff for i, (old, new) in changes if 0 < new.d_ff < old.d_ff}
    if no_attention:
        config, params = surgery.remove_attention(config, params, no_attention)
    if no_ffn:
        config, params = surgery.remove_ffn(config, params, no_ffn)
    if widths:
        config, params, _ = surgery.prune_ffn(
            config, params, widths, keep=widths, scores=selection.contributions, donate=donate
        )
    return config, params


def _offered(
    table: Scores, combine: bool
) -> tuple[dict[int, dict[Choice, float]], set[tuple[int, Choice]]]:
    """Scores of all choices on offer, and which of them are sums."""
    expected = "scores must be BlockScores or {layer: {Choice: score}}"
    if not isinstance(table, Mapping):
        raise ValueError(f"{_NAME}: {expected}, got {type(table).__name__}")
    if any(i not in table for i in range(len(table))):
        raise ValueError(
            f"{_NAME}: scores must have the keys 0, 1, ... for the layers in order, got "
            f"{list(table)}"
        )
    offered: dict[int, dict[Choice, float]] = {}
    sums: set[tuple[int, Choice]] = set()
    for i in range(len(table)):
        if not isinstance(table[i], Mapping):
            raise ValueError(f"{_NAME}: {expected}, got {table[i]!r} for layer {i}")
        own = {_choice(i, c): _score(i, c, score) for c, score in table[i].items()}
        if not own:
            raise ValueError(f"{_NAME}: scores offer nothing for layer {i}")
        found = {c: score for c, score in own.items() if score < math.inf}
        if not found:
            raise ValueError(
                f"{_NAME}: limits cannot be kept: every score of layer {i} is infinite, which "
                "means never; give one of its choices a finite score"
            )
        if combine:
            whole = Choice(max(c.attention for c in own), max(c.d_ff for c in own))
            base = found.get(whole)
            for choice in full_grid(own):
                parts = Choice(choice.attention, whole.d_ff), Choice(whole.attention, choice.d_ff)
                if choice not in own and base is not None and all(p in found for p in parts):
                    found[choice] = sum(found[p] for p in parts) - base
                    sums.add((i, choice))
        offered[i] = found
    return offered, sums


def _choice(layer: int, key: Any) -> Choice:
    try:
        attention, d_ff = key
    except (TypeError, ValueError):
        attention = d_ff = None
    if not isinstance(attention, bool | np.bool_) or isinstance(key, str):
        raise ValueError(
            f"{_NAME}: scores of layer {layer} must have keys Choice(attention, d_ff), got {key!r}"
        )
    width = whole_number(_NAME, f"d_ff in scores of layer {layer}", d_ff, least=0)
    return Choice(bool(attention), width)


def _score(layer: int, choice: Any, score: Any) -> float:
    told = f"the score of layer {layer} as {choice}"
    value = real_number(_NAME, told, score, "a number, or infinity for never")
    if value == -math.inf or 1e300 < abs(value) < math.inf:
        raise ValueError(
            f"{_NAME}: {told} must lie within 1e300, or be infinite for never, got {value}"
        )
    return value


def _check_costs(
    offered: Mapping[int, Mapping[Choice, float]], costs: LayerCosts, limits: Mapping[str, float]
) -> None:
    for name in limits:
        if name not in costs.layers or name not in costs.fixed:
            raise ValueError(
                f"{_NAME}: limits names {name!r}, and costs are known of {sorted(costs.layers)}"
            )
        for i, found in offered.items():
            for choice in found:
                value = costs.layers[name].get(i, {}).get(choice, math.nan)
                if not math.isfinite(value) or not math.isfinite(costs.fixed[name]):
                    raise ValueError(
                        f"{_NAME}: costs.layers[{name!r}][{i}] must hold a finite number for "
                        f"{choice}, which scores offer, got {value}"
                    )


def _over(choices: Mapping[int, Choice], costs: LayerCosts, limits: Mapping[str, float]) -> bool:
    ordered = [choices[i] for i in sorted(choices)]
    return any(costs.total(name, ordered) > limit for name, limit in limits.items())


def _infeasible(keys, rows, costs: LayerCosts, limits: Mapping[str, float]) -> str:
    """Which limits cannot be kept, and by how much, alone and together with the others."""
    room = {name: limits[name] - costs.fixed[name] for name in limits}
    m = 1 + max((i for i, _ in keys), default=-1)
    alone = []
    for name, row in rows.items():
        least = costs.fixed[name] + math.fsum(
            min(v for (k, _), v in zip(keys, row, strict=True) if k == i) for i in range(m)
        )
        if least > limits[name]:
            alone.append(
                f"{name} is at least {least:.6g} with every layer at its cheapest, "
                + _excess(least, limits[name])
            )
    if alone:
        return f"{_NAME}: limits cannot be kept: " + "; ".join(alone)
    told = []
    for name, row in rows.items():
        others = {n: r for n, r in rows.items() if n != name}
        kept = {n: limits[n] for n in others}
        programme = Programme(keys, others, room, lambda cs, kept=kept: _over(cs, costs, kept))
        best = programme.solve(row)
        if best is not None:
            least = costs.total(name, [best[i] for i in sorted(best)])
            told.append(
                f"with the others kept, {name} is at least {least:.6g}, "
                + _excess(least, limits[name])
            )
    if not told:
        told.append("raising a single one of them is not enough")
    return f"{_NAME}: each limit can be kept by itself, but not together: " + "; ".join(told)


def _excess(least: float, limit: float) -> str:
    share = f" ({least / limit - 1:.1%})" if limit > 0 else ""
    return f"{least - limit:.3g}{share} over the limit of {limit:.6g}"
