"""Plots of a run: loss and active neurons over steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparsejax.training.metrics import Row


def plot_run(rows: list[Row], folder: Path, unit: str = "token") -> list[Path]:
    """Writes loss.png and nnz.png from the rows of metrics.jsonl; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = [row["step"] for row in rows]
    return [_plot_loss(rows, steps, folder / "loss.png", unit), _plot_nnz(rows, steps, folder)]


def _plot_loss(rows: list[Row], steps: list[int], path: Path, unit: str) -> Path:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if plain := all("ce" in row for row in rows):
        axes.plot(steps, [row["ce"] for row in rows], label="cross-entropy", marker=_dot(rows))
    for name, label in {"kl": "KL to the teacher", "error": "error of blocks"}.items():
        if found := [row[name] for row in rows if name in row]:
            axes.plot(steps[-len(found) :], found, label=label, marker=_dot(rows))
            plain = False
    label = "cross-entropy + L1 term" if plain else "loss"
    axes.plot(steps, [row["loss"] for row in rows], label=label, ls="--", lw=1)
    nats = not any("error" in row for row in rows)
    ylabel = f"nats per {unit}" if nats else "relative error"
    axes.set(xlabel="step", ylabel=ylabel, title="Training loss")
    return _save(figure, axes, path)


def _plot_nnz(rows: list[Row], steps: list[int], folder: Path) -> Path:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    layers = np.array([row["nnz_per_layer"] for row in rows])
    shades = colormaps["viridis"](np.linspace(0, 0.9, layers.shape[1]))
    for i, color in enumerate(shades):
        axes.plot(steps, layers[:, i], color=color, lw=1, label=f"layer {i}" if i < 12 else None)
    axes.plot(steps, [r["nnz"] for r in rows], color="black", lw=2, label="mean", marker=_dot(rows))
    axes.set(xlabel="step", ylabel="active neurons per token", title="Feed-forward activity")
    # Logarithmic but for the step from 1 to 0, so that a layer that falls silent stays in view.
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0, max(2.0, 1.5 * layers.max(initial=1.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    return _save(figure, axes, folder / "nnz.png")


def _dot(rows: list[Row]) -> str | None:
    return "o" if len(rows) == 1 else None


def _save(figure: Figure, axes, path: Path) -> Path:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)
    return path
