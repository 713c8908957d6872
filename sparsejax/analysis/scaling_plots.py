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
      The figure; a line per variant and kind of split, from the variant's one device on. At the
      right a marker is all time in collectives, the bar's lower end what nothing else covers.
    """
    figure = _figure(figsize=(11, 4.2))
    efficiency, share = figure.subplots(1, 2)
    lines: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        kind = "+".join(a for a, n in zip(AXES, row["split"], strict=True) if n > 1)
        lines[row["variant"], kind].append(row)
    kinds = sorted({kind for _, kind in lines if kind})
    variants = sorted({variant for variant, _ in lines})
    for (variant, kind), members in sorted(lines.items()):
        if not kind and kinds:
            continue  # where the other lines start
        members = sorted(members + (lines[variant, ""] if kind else []), key=_devices)
        counts = [_devices(row) for row in members]
        which = variants.index(variant)
        look = {"color": f"C{kinds.index(kind) if kind else 0}", "marker": "os^"[which % 3]}
        look["linestyle"] = ("--", "-", ":")[which % 3]
        efficiency.plot(counts, [row["efficiency"] for row in members], **look)
        shares = [_share(row, "collective_share") for row in members]
        bare = [_share(row, "collective_exposed_share") for row in members]
        label = f"{variant}, {kind or 'one device'}"
        at = np.array(counts) * (1 + 0.02 * (which - (len(variants) - 1) / 2))
        share.plot(at, shares, label=label, **look)
        share.vlines(at, bare, shares, color=look["color"], alpha=0.6)
    efficiency.set_ylabel("tokens/s over devices x tokens/s of one")
    share.set_ylabel("share of time in collectives (bar: hidden)")
    ticks = sorted({_devices(row) for row in rows})
    for axes in (efficiency, share):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.set_xlabel("devices")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    share.legend(fontsize=7, loc="upper left")
    return _done(figure, path)


def _devices(row: Mapping[str, Any]) -> int:
    return row["devices"]


def _share(row: Mapping[str, Any], name: str) -> float:
    value = row[name]
    return np.nan if value is None else value


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
    ticks = sorted({row["devices"] for row in rows})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel("devices (split: data x fsdp x tensor)")
    axes.set_ylabel("efficiency against one device")
    axes.set_ylim(0, 1.1)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    return _done(figure, path)
