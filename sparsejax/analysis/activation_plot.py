"""A picture of `ActivationStats`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparsejax.analysis.activations import ActivationStats


def plot_activations(stats: ActivationStats, path: str | Path) -> Path:
    """Active neurons per layer and position, silent neurons, and the hottest; returns `path`."""
    rows = stats.summary()
    layers = [row["layer"] for row in rows]
    figure = Figure(figsize=(11, 7), layout="constrained")
    (active, position), (silent, hottest) = figure.subplots(2, 2)
    for name, style in {"mean": "o-", "p50": "--", "p99": "--", "max": ":"}.items():
        active.plot(layers, [row[name] for row in rows], style, label=name)
    active.set(title="active neurons per token", xlabel="layer")
    active.set_yscale("symlog", linthresh=1)
    _by_position(stats, position)
    for name in ("dead", "rare"):
        silent.plot(layers, [100 * r[name] / r["d_ff"] for r in rows], "o-", label=name)
    silent.set(title="neurons that never or rarely (< 0.1 %) fire", xlabel="layer", ylabel="%")
    for name in ("hottest_1_percent", "hottest_5_percent"):
        label = name.replace("_", " ")
        hottest.plot(layers, [100 * row[name] for row in rows], "o-", label=label)
    hottest.set(title="share of all activations", xlabel="layer", ylabel="%")
    for axes in (active, silent, hottest):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    for axes in (active, position, silent, hottest):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{stats.tokens:,} tokens", fontsize=10)
    figure.savefig(path, dpi=120)
    return Path(path)


def _by_position(stats: ActivationStats, axes: Axes) -> None:
    shades = colormaps["viridis"](np.linspace(0, 0.9, max(len(stats.layers), 1)))
    for layer, color in zip(stats.layers, shades, strict=True):
        means = layer.by_position
        # Positions from 1: the first stands out, and a logarithm shows it.
        label = f"layer {layer.layer}" if len(stats.layers) <= 12 else None
        axes.plot(np.arange(1, len(means) + 1), means, color=color, lw=1, label=label)
    axes.set(title="active neurons by position", xlabel="position, from 1", xscale="log")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    if 0 < len(stats.layers) <= 12:
        axes.legend(fontsize=7, ncols=2)
