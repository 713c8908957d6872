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
from sparsejax.analysis.scores import BlockScores, full_grid
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
    contributions: Mapping[int, np.ndarray] | None = None


def select_architecture(
    scores: BlockScores | Scores,
    costs: LayerCosts,
    limits: Mapping[str, float],
    *,
    combine: bool = True,
) -> Selection:
    """argmin over choices c_i of sum_i score_i(c_i) such that every limited total cost fits.

    Solved exactly, as an integer programme (HiGHS): one variable per choice of each layer, or of
    each group of layers that are alike. Totals keep to the limits as computed in float64. Scores
    of single layers are summed, which ignores that layers changed together may lose more or less.

    Args:
      scores: what `block_scores` gives, or {layer: {Choice: score}}; layers 0, 1, ... m - 1.
      costs: what `cost.layer_costs` gives, or measured numbers in its place.
      limits: {name: most}, names in `costs`: "latency" and "prefill_latency" in seconds, "memory"
        (each device) and "kv_cache" in bytes, "parameters".
      combine: also offer pairs of a kind of attention and a width that were not scored together,
        at the sum of their scores.

    Returns:
      Selection, for `apply_selection`.

    Raises:
      ValueError: limits that nothing keeps to (says which, and by how much), unknown names, costs
        missing, or numbers that are not finite.

    Source: mixed-integer search of Puzzle, arXiv 2411.19146.
    """
    table = scores.kl if isinstance(scores, BlockScores) else scores
    offered, sums = _offered(table, combine)
    _check_costs(offered, costs, limits)
    keys = [(i, c) for i, found in offered.items() for c in found]
    objective = np.array([offered[i][c] for i, c in keys])
    rows = {name: np.array([costs.layers[name][i][c] for i, c in keys]) for name in limits}
    room = {name: limits[name] - costs.fixed[name] for name in limits}
    found = _solve(keys, objective, rows, room, lambda cs: _over(cs, costs, limits))
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
    if sorted(table) != list(range(len(table))):
        raise ValueError(
            f"{_NAME}: scores must have the keys 0, 1, ... for the layers in order, got "
            f"{list(table)}"
        )
    offered: dict[int, dict[Choice, float]] = {}
    sums: set[tuple[int, Choice]] = set()
    for i in range(len(table)):
        found = {Choice(*c): float(score) for c, score in table[i].items()}
        if not found:
            raise ValueError(f"{_NAME}: scores offer nothing for layer {i}")
        for choice, score in found.items():
            if not math.isfinite(score):
                raise ValueError(f"{_NAME}: the score of layer {i} as {choice} is {score}")
        if combine:
            whole = Choice(max(c.attention for c in found), max(c.d_ff for c in found))
            base = found.get(whole)
            for choice in full_grid(found):
                parts = Choice(choice.attention, whole.d_ff), Choice(whole.attention, choice.d_ff)
                if choice not in found and base is not None and all(p in table[i] for p in parts):
                    found[choice] = sum(table[i][p] for p in parts) - base
                    sums.add((i, choice))
        offered[i] = found
    return offered, sums


def _check_costs(
    offered: Mapping[int, Mapping[Choice, float]], costs: LayerCosts, limits: Mapping[str, float]
) -> None:
    for name, limit in limits.items():
        if name not in costs.layers or name not in costs.fixed:
            raise ValueError(
                f"{_NAME}: limits names {name!r}, and costs are known of {sorted(costs.layers)}"
            )
        if math.isnan(limit):
            raise ValueError(f"{_NAME}: limits[{name!r}] must be a number, got {limit}")
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


def _solve(keys, objective, rows, room, over) -> dict[int, Choice] | None:
    """The best choices, or None if none keep to the limits.

    Layers with the same scores and costs are one group, of which the programme says how many take
    each choice: one by one, their many equal permutations would cost the solver minutes. Where its
    tolerance lets a solution pass that is over a limit after all, layers are told apart, and that
    one combination is forbidden.
    """
    columns: dict[int, list[int]] = {}
    for column, (i, _) in enumerate(keys):
        columns.setdefault(i, []).append(column)
    groups: dict[Any, list[int]] = {}
    for i, mine in columns.items():
        told = [(keys[c][1], objective[c], *(row[c] for row in rows.values())) for c in mine]
        groups.setdefault(tuple(told), []).append(i)
    alike, apart = list(groups.values()), [[i] for i in columns]
    forbidden: list[list[int]] = []
    while len(forbidden) < 1000:
        now = apart if forbidden else alike
        found = _programme(now, columns, objective, rows, room, forbidden)
        if found is None:
            return None
        choices = {i: keys[c][1] for i, c in found.items()}
        if not over(choices):
            return choices
        forbidden.append(list(found.values()))
    raise ValueError(
        f"{_NAME}: 1000 combinations lie within rounding of a limit; raise it a little"
    )


def _programme(groups, columns, objective, rows, room, forbidden) -> dict[int, int] | None:
    """The integer programme: {layer: column of the choice taken}, or None if infeasible."""
    from scipy import optimize as scipy_optimize

    optimize: Any = scipy_optimize  # its types know bounds that are numbers only

    if not groups:
        return {} if all(r >= 0 for r in room.values()) else None
    # One variable per group and choice, at the column of the group's first layer.
    used = np.array([c for group in groups for c in columns[group[0]]])
    sizes = np.array([len(group) for group in groups for _ in columns[group[0]]])
    member = np.array([[c in columns[group[0]] for c in used] for group in groups], float)
    constraints = [
        optimize.LinearConstraint(member, [len(g) for g in groups], [len(g) for g in groups])
    ]
    for name, row in rows.items():
        if room[name] == math.inf:
            continue
        # The solver's tolerance is absolute, 1e-6: bytes and seconds become numbers around 1000.
        scale = 1e3 / max(np.abs(row).max(), abs(room[name]) / len(columns), 1e-300)
        constraints.append(
            optimize.LinearConstraint(row[used] * scale, -np.inf, room[name] * scale)
        )
    for taken in forbidden:
        constraints.append(
            optimize.LinearConstraint(np.isin(used, taken).astype(float), -np.inf, len(columns) - 1)
        )
    spread = np.abs(objective).max()
    result = optimize.milp(
        objective[used] * (1e5 / spread if spread > 0 else 1.0),
        constraints=constraints,
        integrality=np.ones(len(used)),
        bounds=optimize.Bounds(0, sizes),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        if result.status != 2:
            raise ValueError(f"{_NAME}: the solver stopped: {result.message}")
        return None
    counts = dict(zip(used.tolist(), np.round(result.x).astype(int).tolist(), strict=True))
    found: dict[int, int] = {}
    for group in groups:
        order = [k for k, c in enumerate(columns[group[0]]) for _ in range(counts[c])]
        found |= {i: columns[i][k] for i, k in zip(group, order, strict=True)}
    return dict(sorted(found.items()))


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
        best = _solve(keys, row, others, room, lambda cs, kept=kept: _over(cs, costs, kept))
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
