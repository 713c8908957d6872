"""What the figures of the studies share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Record = dict[str, Any]


def grouped(rows: Iterable[Record], key: str) -> dict[Any, list[Record]]:
    """Rows by their value of `key`, in the order of its first occurrence."""
    found = defaultdict(list)
    for r in rows:
        found[r[key]].append(r)
    return found


def bars(middle: Any, least: Any, most: Any) -> np.ndarray:
    """(2, n) lengths of error bars, down and up."""
    # A mean of equal values may be rounded to beyond them, and lengths must not be negative.
    return np.abs(np.array([least, most]) - np.array(middle))


def log(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis, with zero on it, where values differ by more than tenfold."""
    values = [float(v) for v in values]
    least, most = min(values, default=1.0), max(values, default=1.0)
    if most > 10 * least:
        scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
        scale("symlog", linthresh=1)
        axis.set_major_formatter("{x:g}")
        limits = axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim
        limits(least / 1.5 if least > 1 else 0, 1.5 * most)


def note(axes: Axes, text: str, at: Any, offset: tuple[float, float], **style: Any) -> None:
    """Small text beside a point, on paper of its own so that no line runs through it."""
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    axes.annotate(text, at, offset, textcoords=_POINTS, fontsize=7, bbox=paper, **style)


_POINTS: Any = "offset points"


def finish(figure: Figure, path: Path, rows: Sequence[Record], *, legends: bool = True) -> Figure:
    """Adds grids, legends and the device of `rows`; saves the figure to `path`."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        if legends and axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    if rows:
        figure.suptitle(
            f"{rows[-1]['device']}, jax {rows[-1]['jax']}", fontsize=8, x=0.99, ha="right"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return figure
