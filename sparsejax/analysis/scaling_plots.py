"""Figures of scaling: measured rows of experiments/bench_scaling.py, and plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsejax.analysis.plots import _done, _figure
from sparsejax.sharding import AXES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_scaling(rows: Sequence[Mapping[str, Any]], path: str | Path | None = None) -> Figure:
    """Efficiency against one device, and share of time in collectives, over device count.

    Args:
      rows: of experiments/bench_scaling.py.
      path: where to save it, None for nowhere.

    Returns:
      The figure; a line per variant and kind of split.
    """
    figure = _figure(figsize=(10, 4.2))
    efficiency, share = figure.subplots(1, 2)
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        kind = "+".join(a for a, n in zip(AXES, row["split"], strict=True) if n > 1)
        lines[row["variant"], kind].append(row)
    kinds = sorted({kind for _, kind in lines})
    styles = {v: s for v, s in zip(sorted({v for v, _ in lines}), ("-", "--", ":"), strict=False)}
    for (variant, kind), members in sorted(lines.items()):
        members = sorted(members, key=lambda row: row["devices"])
        counts = [row["devices"] for row in members]
        look = {"color": f"C{kinds.index(kind)}", "linestyle": styles[variant], "marker": "o"}
        label = f"{variant}, {kind or 'one device'}"
        efficiency.plot(counts, [row["efficiency"] for row in members], label=label, **look)
        if kind:
            shares = [np.nan if (s := row["collective_share"]) is None else s for row in members]
            share.plot(counts, shares, **look)
    efficiency.set_ylabel("tokens/s over devices x tokens/s of one")
    share.set_ylabel("share of time in collectives")
    for axes in (efficiency, share):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("devices")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    efficiency.legend(fontsize=7)
    return _done(figure, path)


def plot_plan(rows: Sequence[Mapping[str, Any]], path: str | Path | None = None) -> Figure:
    """Efficiency of the best modelled split over device count, one band per kind of batch.

    Args:
      rows: of `scaling.plan_rows`, with "batch", a name, added.
      path: where to save it, None for nowhere.

    Returns:
      The figure; a band lies between nothing and everything hidden, the split is written above it.
    """
    figure = _figure(figsize=(7.5, 4.5))
    axes = figure.subplots()
    bands: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["place"] == 1:
            bands[row["batch"]].append(row)
    for i, (name, members) in enumerate(bands.items()):
        counts = [row["devices"] for row in members]
        low, high = zip(*(row["efficiency"] for row in members), strict=True)
        axes.fill_between(counts, low, high, color=f"C{i}", alpha=0.25, label=name)
        axes.plot(counts, low, color=f"C{i}", marker="o")
        for row, at in zip(members, low, strict=True):
            text = "x".join(map(str, row["split"]))
            offset = (0, -12 if i == 0 else 8)
            axes.annotate(
                text, (row["devices"], at), offset, textcoords="offset points", fontsize=6,
                color=f"C{i}", ha="center",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xlabel("devices (split: data x fsdp x tensor)")
    axes.set_ylabel("efficiency against one device")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    return _done(figure, path)
