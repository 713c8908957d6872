"""Figures of analyses: returned, so that a notebook shows them, and saved where a path is given."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsejax.analysis.dependency import Dependency
from sparsejax.analysis.scores import BlockScores

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_dependency(
    dependency: Dependency,
    path: str | Path | None = None,
    *,
    low: float = 2.0**-9,
    high: float = 2.0**-1,
) -> Figure:
    """Heat map of M[i, j] in a logarithmic scale of base 2: layers of a blue square hardly depend.

    Rows are removed layers, columns measured ones; blank is where there is nothing to measure.

    Args:
      dependency: what `block_dependency` gives.
      path: where to save it, None for nowhere.
      low, high: ends of the colour scale; entries beyond have the end's colour. The defaults are
        those of the published figures.

    Returns:
      The figure.

    Raises:
      ValueError: ends that are no positive interval.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if not 0 < low < high:
        raise ValueError(f"plot_dependency: low and high must be 0 < low < high, got {low}, {high}")
    matrix = dependency.matrix
    figure = _figure(figsize=(6.4, 5.2))
    axes = figure.subplots()
    # Zero has no logarithm: what is below the scale is shown as its lower end.
    shown = np.where(np.isnan(matrix), np.nan, np.clip(matrix, low, high))
    m = max(len(matrix), 1)
    image = axes.imshow(
        shown.reshape(len(matrix), -1) if len(matrix) else np.full((1, 1), np.nan),
        norm=LogNorm(low, high),
        cmap="RdYlBu_r",
        interpolation="nearest",
    )
    axes.set_facecolor("0.93")
    what = {"block": "layer", "attention": "attention of layer", "ffn": "FFN of layer"}
    name = what[dependency.part]
    axes.set(
        xlabel=f"{name} measured",
        ylabel=f"{name} removed",
        title=f"Dependency ({dependency.tokens:,} tokens)",
        xlim=(-0.5, m - 0.5),
        ylim=(m - 0.5, -0.5),
    )
    for axis in (axes.xaxis, axes.yaxis):
        _whole_numbers(axis)
    bar = figure.colorbar(image, ax=axes, label="cosine distance of the contribution")
    exponents = np.arange(np.ceil(np.log2(low)), np.floor(np.log2(high)) + 1)
    bar.locator = FixedLocator(list(2.0**exponents))
    bar.formatter = FuncFormatter(lambda value, _: f"$2^{{{np.log2(value):.0f}}}$")
    bar.minorlocator = NullLocator()
    bar.update_ticks()
    return _done(figure, path)


def plot_scores(scores: BlockScores, path: str | Path | None = None) -> Figure:
    """KL of removing attention and FFN, and of each narrower width, per layer, logarithmic.

    Args:
      scores: what `block_scores` gives.
      path: where to save it, None for nowhere.

    Returns:
      The figure.
    """
    figure = _figure(figsize=(7.5, 4.2))
    axes = figure.subplots()
    layers = np.arange(len(scores.kl))
    lines = {
        "attention removed": (scores.removal("attention"), "C0", "o"),
        "FFN removed": (scores.removal("ffn"), "C3", "s"),
    }
    widths = sorted(
        {c.d_ff for found in scores.kl.values() for c in list(found)[1:] if c.d_ff}
        - ({next(iter(f)).d_ff for f in scores.kl.values()} if _one_width(scores) else set())
    )
    for k, width in enumerate(widths):
        values = [_narrowed(found, width) for found in scores.kl.values()]
        shade = 0.4 + 0.5 * k / max(len(widths) - 1, 1)
        lines[f"FFN narrowed to {width:,}"] = (np.array(values), _color("Greens", shade), ".")
    drawn = False
    for label, (values, color, marker) in lines.items():
        values = np.where(values > 0, values, np.nan)  # a logarithmic scale has no zero
        if np.isfinite(values).any():
            axes.plot(layers, values, color=color, marker=marker, ms=4, lw=1.2, label=label)
            drawn = True
    if drawn:
        axes.set_yscale("log")
        axes.legend(fontsize=8)
    axes.set(
        xlabel="layer changed",
        ylabel="KL to the whole model (nats per token)",
        title=f"What one layer is worth ({scores.tokens:,} tokens)",
    )
    axes.grid(alpha=0.3)
    _whole_numbers(axes.xaxis)
    return _done(figure, path)


def plot_layers(scores: BlockScores, path: str | Path | None = None) -> Figure:
    """Cosine distance of a layer's input and output, and |h| / |x|, per layer.

    Args:
      scores: what `block_scores` gives.
      path: where to save it, None for nowhere.

    Returns:
      The figure.
    """
    figure = _figure(figsize=(7.5, 5.2))
    upper, lower = figure.subplots(2, sharex=True)
    layers = np.arange(len(scores.cosine))
    upper.plot(layers, 1 - scores.cosine, color="C0", marker="o", ms=4, lw=1.2)
    upper.set(ylabel="1 - cos(input, output)", title=f"Layers ({scores.tokens:,} tokens)")
    lower.plot(layers, scores.relative_norm, color="C1", marker="o", ms=4, lw=1.2)
    lower.set(xlabel="layer", ylabel="|contribution| / |input|")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    _whole_numbers(lower.xaxis)
    return _done(figure, path)


def _one_width(scores: BlockScores) -> bool:
    return len({next(iter(found)).d_ff for found in scores.kl.values()}) == 1


def _narrowed(found: dict[Any, float], width: int) -> float:
    now = next(iter(found))
    value = found.get(now._replace(d_ff=width), np.nan)
    return np.nan if width == now.d_ff else value


def _color(name: str, at: float) -> Any:
    from matplotlib import colormaps

    return colormaps[name](at)


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


@functools.cache
def _shown_figure() -> Any:
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A figure that a notebook shows by itself, pyplot imported or not."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=100)
            return buffer.getvalue()

    return ShownFigure


def _figure(**kwargs: Any) -> Any:
    return _shown_figure()(layout="constrained", **kwargs)


def _done(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    return figure
