"""One choice per layer such that an objective is least and limits are kept: an integer programme.

HiGHS works to an absolute tolerance, so what it sees has to be of one magnitude. Choices that
cannot be part of the best solution are left out before they set the scale: those that no limit has
room for, and those that alone exceed what a solution already found costs. Where large values cannot
be avoided (one that forbids, in every solution), the best sum of large ones is found first, and the
small ones are minimised among the solutions that keep to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sparsejax.analysis.choices import Choice

_NAME = "select_architecture"
# Of the largest value in the objective; less is left to a second pass over the small ones.
_RESOLVED = 1e-6


@dataclasses.dataclass(frozen=True)
class Programme:
    """min over one column per layer of sum objective, such that sum row <= room for every row.

    Attributes:
      keys: (layer, choice) of each column.
      rows: {name: cost of each column}.
      room: {name: most}, infinite for no limit.
      over: whether choices exceed a limit as computed in float64, which decides.
    """

    keys: Sequence[tuple[int, Choice]]
    rows: Mapping[str, np.ndarray]
    room: Mapping[str, float]
    over: Callable[[Mapping[int, Choice]], bool]

    def solve(self, objective: np.ndarray) -> dict[int, Choice] | None:
        """{layer: the choice taken}, or None if nothing keeps to the limits."""
        found = _least(self, objective, np.ones(len(self.keys), bool), [])
        return None if found is None else {i: self.keys[c][1] for i, c in found.items()}

    def columns(self, alive: np.ndarray) -> dict[int, list[int]]:
        """The columns of each layer, those that are alive."""
        columns: dict[int, list[int]] = {i: [] for i, _ in self.keys}
        for column in np.flatnonzero(alive).tolist():
            columns[self.keys[column][0]].append(column)
        return dict(sorted(columns.items()))


Found = dict[int, int]


def _least(
    programme: Programme, objective: np.ndarray, alive: np.ndarray, forbidden: list[list[int]]
) -> Found | None:
    """{layer: column}; `forbidden` collects combinations that only rounding lets through."""
    best, best_value = None, math.inf
    largest = math.inf
    while True:
        alive = _affordable(programme, alive)
        columns = programme.columns(alive)
        if not all(columns.values()):
            return best
        reduced = np.zeros_like(objective)
        for mine in columns.values():
            reduced[mine] = objective[mine] - objective[mine].min()
        now = reduced[alive].max(initial=0.0)
        if best is not None and not now < 0.1 * largest:
            break
        largest = now
        found = _kept(programme, reduced, columns, forbidden)
        if found is None:
            return best
        value = _total(objective, found)
        if value < best_value or best is None:
            best, best_value = found, value
        # No layer can gain on its own least value, so a column above the whole sum is in no better
        # solution.
        bound = _total(reduced, best)
        alive = alive & (reduced <= bound)
    small = _small(reduced, alive, len(columns))
    if small is not None:
        level = reduced - small
        most = _total(level, best)
        rows = {**programme.rows, f"level {len(programme.rows)}": level}
        room = {**programme.room, f"level {len(programme.rows)}": most * (1 + 1e-9)}
        within = dataclasses.replace(programme, rows=rows, room=room)
        found = _least(within, small, alive, forbidden)
        if found is not None and _total(objective, found) < best_value:
            return found
    return best


def _total(values: np.ndarray, found: Found) -> float:
    return math.fsum(values[c] for c in found.values())


def _affordable(programme: Programme, alive: np.ndarray) -> np.ndarray:
    """`alive` without columns that break a limit even with all other layers at their cheapest."""
    while True:
        before = alive
        columns = programme.columns(alive)
        for name, row in programme.rows.items():
            room = programme.room[name]
            if room == math.inf or not all(columns.values()):
                continue
            least = {i: row[mine].min() for i, mine in columns.items()}
            spare = room - math.fsum(least.values())
            # Well above what rounding makes of a limit that is met exactly.
            spare += 1e-9 * (abs(room) + math.fsum(abs(v) for v in least.values()))
            floor = np.array([least[i] for i, _ in programme.keys])
            alive = alive & (row - floor <= spare)
            columns = programme.columns(alive)
        if (alive == before).all():
            return alive


def _small(reduced: np.ndarray, alive: np.ndarray, layers: int) -> np.ndarray | None:
    """`reduced` without its large values, or None where the solver tells all of them apart.

    Large are those above the highest gap of a factor that no sum of smaller ones bridges. Of large
    ones that agree to 1e-6 what they exceed the least of them by stays, as a small value.
    """
    values = np.unique(reduced[alive & (reduced > 0)])
    if values.size < 2 or values[0] >= _RESOLVED * values[-1]:
        return None
    gaps = np.flatnonzero(values[1:] > 10 * layers * values[:-1])
    if not gaps.size:
        return None
    small = reduced.copy()
    base = 0.0
    for value in values[gaps[-1] + 1 :]:
        base = base if value <= base * (1 + 1e-6) else value
        small[reduced == value] = value - base
    return small


def _kept(
    programme: Programme,
    objective: np.ndarray,
    columns: Mapping[int, list[int]],
    forbidden: list[list[int]],
) -> Found | None:
    """The solver's best solution that keeps to the limits in float64, None if there is none.

    Layers with the same scores and costs are one group, of which the programme says how many take
    each choice: one by one, their many equal permutations would cost the solver minutes. Where its
    tolerance lets a solution pass that is over a limit after all, layers are told apart, and that
    one combination is forbidden.
    """
    groups: dict[Any, list[int]] = {}
    rows = programme.rows.values()
    for i, mine in columns.items():
        told = [(programme.keys[c][1], objective[c], *(row[c] for row in rows)) for c in mine]
        groups.setdefault(tuple(told), []).append(i)
    alike, apart = list(groups.values()), [[i] for i in columns]
    while len(forbidden) < 1000:
        now = apart if forbidden else alike
        found = _solver(programme, objective, now, columns, forbidden)
        if found is None:
            return None
        if not programme.over({i: programme.keys[c][1] for i, c in found.items()}):
            return found
        forbidden.append(list(found.values()))
    raise ValueError(
        f"{_NAME}: 1000 combinations lie within rounding of a limit; raise it a little"
    )


def _solver(
    programme: Programme,
    objective: np.ndarray,
    groups: list[list[int]],
    columns: Mapping[int, list[int]],
    forbidden: list[list[int]],
) -> Found | None:
    from scipy import optimize as scipy_optimize

    optimize: Any = scipy_optimize  # its types know bounds that are numbers only

    if not groups:
        return {} if all(r >= 0 for r in programme.room.values()) else None
    # One variable per group and choice, at the column of the group's first layer.
    used = np.array([c for group in groups for c in columns[group[0]]])
    sizes = np.array([len(group) for group in groups for _ in columns[group[0]]])
    member = np.array([[c in columns[group[0]] for c in used] for group in groups], float)
    constraints = [
        optimize.LinearConstraint(member, [len(g) for g in groups], [len(g) for g in groups])
    ]
    for name, row in programme.rows.items():
        room = programme.room[name]
        if room == math.inf:
            continue
        # The solver's tolerance is absolute, 1e-6: bytes and seconds become numbers around 1000.
        scale = 1e3 / max(np.abs(row[used]).max(), abs(room) / len(columns), 1e-300)
        constraints.append(optimize.LinearConstraint(row[used] * scale, -np.inf, room * scale))
    for taken in forbidden:
        constraints.append(
            optimize.LinearConstraint(np.isin(used, taken).astype(float), -np.inf, len(columns) - 1)
        )
    spread = np.abs(objective[used]).max()
    result = optimize.milp(
        objective[used] / spread * 1e5 if spread > 0 else objective[used],
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
    found: Found = {}
    for group in groups:
        order = [k for k, c in enumerate(columns[group[0]]) for _ in range(counts[c])]
        found |= {i: columns[i][k] for i, k in zip(group, order, strict=True)}
    return dict(sorted(found.items()))
