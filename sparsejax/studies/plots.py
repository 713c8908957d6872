"""Figures of the studies, from their records alone: saved to `path`, and returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Record = dict[str, Any]
# Of a family of runs (variant, revival, warm-up): label, colour, marker.
_FAMILIES = {
    ("silu", False, False): ("SiLU", "C7", "*"),
    ("relu", False, False): ("gated ReLU", "C0", "o"),
    ("relu", True, False): ("with revival", "C1", "o"),
    ("relu", False, True): ("with L1 warm-up", "C3", "o"),
    ("nongated", False, False): ("not gated", "C2", "s"),
}
# Of a way to make a model shallower: line and marker, colour.
_WAYS = {
    "base": ("*", "black"),
    "fuse": ("o-", "C0"),
    "fuse, last layer in": ("^-", "C1"),
    "fuse, own norms": ("s--", "C2"),
    "reverse": ("d:", "C3"),
    "remove": ("x-", "C4"),
    "fuse, distilled": ("P", "C0"),
    "remove, distilled": ("X", "C4"),
    "base, distilled": ("*", "C7"),
}


def plot_sparsity(rows: Sequence[Record], path: Path) -> Figure:
    """Six panels: loss, activity, dead neurons by coefficient; where activity is; overfitting."""
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    (loss, activity, dead), (layers, positions, curves) = figure.subplots(2, 3)
    short = [r for r in rows if r["key"]["length"] == 1]
    for family, (label, color, marker) in _FAMILIES.items():
        group = [r for r in short if _family(r) == family]
        if not group:
            continue
        _quality(loss, group, label, f"{marker}-", color)
        counted = [r for r in group if "layer_stats" in r]
        for axes, value in ((activity, _nnz), (dead, _dead)) if counted else ():
            x, mean, least, most = _by_l1(counted, value)
            axes.plot(x, mean, "o-", color=color, label=label, ms=4)
            axes.fill_between(x, least, most, color=color, alpha=0.2)
    loss.set(xlabel="active neurons per token and layer", ylabel="held-out nats per token")
    loss.set(title="quality, with L1 coefficients (bars: range over seeds)")
    _log(loss.xaxis, [r["nnz"] for r in short])
    for axes in (activity, dead):
        axes.set_xscale("symlog", linthresh=1e-5)
        axes.set(xlabel="L1 coefficient")
    _log(activity.yaxis, [r["nnz"] for r in short])
    activity.set(ylabel="active neurons per token and layer", title="activity")
    dead.set(ylabel="% of neurons", title="neurons that fire nowhere in the held-out text")
    _where(short, layers, positions)
    for k, r in enumerate(_longest(rows)):
        points = [p for p in r["curve"] if p["train"] is not None]
        x = [p["tokens"] / 1e6 for p in points]
        color = f"C{k}"
        curves.plot(x, [p["held_out"] for p in points], color=color, label=r["name"])
        curves.plot(x, [p["train"] for p in points], color=color, ls="--", lw=1)
        best = min(points, key=lambda p: p["held_out"])
        curves.plot(best["tokens"] / 1e6, best["held_out"], "v", color=color)
    shown = [p for r in _longest(rows) for p in r["curve"] if p["train"] is not None]
    if shown:  # the steep beginning says little
        top = min(curves.get_ylim()[1], min(p["held_out"] for p in shown) + 1)
        curves.set_ylim(top=top)
        begin = min((p["tokens"] for p in shown if p["held_out"] <= top), default=0)
        curves.set_xlim(left=0.9 * begin / 1e6)
    curves.set(xlabel="million tokens", ylabel="nats per token")
    curves.set(title="held-out loss (least marked), training loss (dashed)")
    return _finish(figure, path, rows)


def _quality(axes: Axes, group: Sequence[Record], label: str, style: str, color: str) -> None:
    """Loss against activity of a family, a point per coefficient."""
    coefficients, *x = _by_l1(group, _nnz)
    _, *y = _by_l1(group, lambda r: r["ce"])
    style_of: Any = {"fmt": style, "color": color, "lw": 0.8, "label": label}
    axes.errorbar(x[0], y[0], xerr=_bars(*x), yerr=_bars(*y), **style_of)
    if group[0]["key"]["variant"] == "silu":
        return
    for l1, *at in zip(coefficients, x[0], y[0], strict=True):
        # Beside the bars, and to the other side where another family's points lie close.
        left = _family(group[0]) == ("relu", False, False) and l1 > 0
        offset, side = ((-5, 0), "right") if left else ((5, 0), "left")
        _note(axes, f"{l1:g}", at, offset, color=color, va="center", ha=side)


def _where(rows: Sequence[Record], layers: Axes, positions: Axes) -> None:
    """Activity by layer and position of the gated ReLU runs of the first seed."""
    group = [r for r in rows if _family(r) == ("relu", False, False) and "layer_stats" in r]
    group = sorted(_first_seed(group), key=lambda r: r["key"]["l1"])
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(group)))
    for color, r in zip(shades, group, strict=True):
        label = f"L1 {r['key']['l1']:g}"
        x = [entry["layer"] for entry in r["layer_stats"]]
        # One legend serves both panels; here it would lie upon lines.
        layers.plot(x, [entry["mean"] for entry in r["layer_stats"]], "o-", color=color)
        at = [1 + (entry["from"] + entry["to"]) / 2 for entry in r["positions"]]
        positions.plot(at, [entry["nnz"] for entry in r["positions"]], color=color, label=label)
    layers.set(xlabel="layer", ylabel="active neurons per token")
    layers.set(title="by layer (colours as beside)")
    layers.xaxis.set_major_locator(MaxNLocator(integer=True))
    positions.set(xlabel="position in the sequence, from 1", xscale="log", title="by position")
    for axes in (layers, positions):
        _log(axes.yaxis, [y for line in axes.lines for y in np.asarray(line.get_ydata())])


def plot_speed(rows: Sequence[Record], path: Path) -> Figure:
    """Ratio to the fastest dense form per mode: whole model, and without dead neurons."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, energy = figure.subplots(1, 2)
    sparse = [r for r in rows if r["variant"] == "sparse_relu"]
    names = list(dict.fromkeys(_where_run(r) for r in sparse))
    kinds = list(dict.fromkeys((r["checkpoint"], r["pruned"]) for r in sparse))
    width = 0.8 / max(len(kinds), 1)
    for k, (checkpoint, pruned) in enumerate(kinds):
        found = {_where_run(r): r for r in sparse if (r["checkpoint"], r["pruned"]) == kinds[k]}
        x = np.array([names.index(n) for n in found]) + (k - (len(kinds) - 1) / 2) * width
        label = f"{checkpoint}{', dead neurons dropped' if pruned else ''}"
        label += f" (nnz {np.mean([np.mean(r['nnz_seen']) for r in found.values()]):.0f})"
        style = {"color": f"C{k // 2}", "alpha": 0.55 if pruned else 1.0, "width": width}
        ratios = [r["ratio_to_fastest_dense"] for r in found.values()]
        dense = [q * r["ms"] for q, r in zip(ratios, found.values(), strict=True)]  # its median
        slow, fast = ([r[f"ms_{end}"] for r in found.values()] for end in ("max", "min"))
        ends = np.divide(dense, slow), np.divide(dense, fast)
        speed.bar(x, ratios, yerr=_bars(ratios, *ends), label=label, **style)
        for at, top, ratio, r in zip(x, ends[1], ratios, found.values(), strict=True):
            note = f"{ratio:.2f}\n{r['sparse_layers']:g}/{len(r['d_ff'])} sparse"
            speed.annotate(note, (at, top), ha="center", va="bottom", fontsize=7)
        joules = [r.get("energy_ratio") for r in found.values()]
        if all(j is not None for j in joules):
            energy.bar(x, joules, label=label, **style)
    for axes, title in (
        (speed, "speed over the fastest dense form (bars: least to most)"),
        (energy, "energy per token over that of the fastest dense form"),
    ):
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(top=1.35 * axes.get_ylim()[1])  # room for the legend
        axes.set(title=title, xlabel="what is run x rows")
    if not energy.patches:
        energy.text(0.5, 0.5, "not measured", ha="center", transform=energy.transAxes)
    return _finish(figure, path, rows)


def plot_size(
    rows: Sequence[Record], published: Mapping[str, Mapping[str, float]], path: Path
) -> Figure:
    """Gain over the fastest dense form against size, beside the published numbers."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (mode, theirs) in zip(figure.subplots(1, 2), published.items(), strict=True):
        mine = {r["key"]["preset"]: r for r in rows if r["key"]["mode"] == mode}
        sizes = [*theirs, *(name for name in mine if name not in theirs)]
        axes.plot(range(len(theirs)), list(theirs.values()), "s--", color="C7", label="published")
        known = [s for s in sizes if s in mine]
        x = [sizes.index(s) for s in known]
        gains = np.array([mine[s]["gain_percent"] for s in known])
        low = [mine[s]["gain_least"] for s in known]
        high = [mine[s]["gain_most"] for s in known]
        error = _bars(gains, low, high) if known else None
        axes.errorbar(x, gains, yerr=error, fmt="o-", label="here (bars: least to most)")
        axes.axhline(0, color="black", lw=0.8)
        axes.set_xticks(range(len(sizes)), sizes)
        axes.set(xlabel="size", ylabel="% more tokens per second", title=mode)
    return _finish(figure, path, rows)


def plot_fusion(rows: Sequence[Record], windows: Sequence[Record], path: Path) -> Figure:
    """Held-out loss and decode time against feed-forward steps saved; windows of whole layers."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    loss, latency, parallel = figure.subplots(1, 3)
    families = defaultdict(list)
    for r in rows:
        families[r["family"]].append(r)
    for family, group in families.items():
        if family in ("parent", "cut"):
            label = {"parent": "parent", "cut": "parent without these attentions"}[family]
            loss.axhline(group[0]["ce"], color=f"{0.6 * (family == 'cut')}", ls=":", label=label)
            if group[0].get("decode_ms") is not None:  # far above, and all else would be small
                latency.plot([], [], " ", label=f"parent: {group[0]['decode_ms']:.3f}")
            continue
        group = sorted(group, key=lambda r: r["order_of"])
        x = [r["order_of"] for r in group]
        mark, color = _WAYS[family]
        loss.plot(x, [r["ce"] for r in group], mark, color=color, label=family, ms=5)
        timed = [r for r in group if r.get("decode_ms") is not None]
        if timed:
            times = [[r[f"decode_{t}"] for r in timed] for t in ("ms", "least", "most")]
            saved, style = [r["saved"] for r in timed], {"fmt": mark, "color": color, "ms": 5}
            latency.errorbar(saved, times[0], yerr=_bars(*times), label=family, **style)
    loss.set(xlabel="feed-forward steps saved (reverse: by the same group)")
    loss.set(ylabel="held-out nats per token", title="quality, untrained but for 'distilled'")
    latency.set(xlabel="feed-forward steps saved", ylabel="ms per decode step, one row")
    latency.set(title="latency (bars: least to most)")
    for length, group in _grouped(windows, "length").items():
        counts = [r["count"] for r in group]
        parallel.plot(counts, [r["ce"] for r in group], "o-", label=f"{length} layers each")
    parallel.set(xlabel="windows of whole layers side by side", ylabel="held-out nats per token")
    parallel.set(title="full-block parallelisation")
    for axes in (loss, latency, parallel):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, path, rows)


def plot_waterfall(rows: Sequence[Record], path: Path) -> Figure:
    """Decode and prefill time after each step, as what the step took or added; loss beside it."""
    figure = Figure(figsize=(17, 5), layout="constrained")
    decode, prefill, loss = figure.subplots(1, 3)
    names = [r["step"] for r in rows]
    for axes, mode, label in (
        (decode, "decode", "ms per decode step, one row"),
        (prefill, "prefill", "ms per prefill"),
    ):
        times = [r[f"{mode}_ms"] for r in rows]
        ends = [[r[f"{mode}_{end}"] for r in rows] for end in ("least", "most")]
        for k, (now, before) in enumerate(zip(times, [0.0, *times], strict=False)):
            change = now - before
            color = "C7" if k == 0 else "C2" if change < 0 else "C3"
            axes.bar(k, abs(change), bottom=min(now, before), color=color)
            text = f"{now:.3g}" if k == 0 else f"{100 * change / times[0]:+.1f} %"
            at = k, max(now, before, ends[1][k])
            axes.annotate(text, at, ha="center", fontsize=7, va="bottom")
        axes.bar(len(rows), times[-1], color="C7")
        at = len(rows), max(times[-1], ends[1][-1])
        axes.annotate(f"{times[-1]:.3g}", at, ha="center", fontsize=7, va="bottom")
        x, last = range(len(rows) + 1), (slice(None), [*range(len(rows)), -1])
        bars = _bars(times, *ends)[last]
        axes.errorbar(x, [*times, times[-1]], yerr=bars, fmt="none", ecolor="black", lw=0.8)
        axes.set(ylabel=label, title=f"{mode}: what each step bought (bars: least to most)")
        axes.set_xticks(x, [*names, "result"], rotation=40, ha="right")
    _losses(loss, rows)
    loss.set(ylabel="held-out nats per token", title="what it cost (below: active neurons)")
    loss.set_xticks(range(len(rows)), names, rotation=40, ha="right")
    for axes in (decode, prefill, loss):
        axes.tick_params(labelsize=8)
    return _finish(figure, path, rows, legends=False)


def _losses(axes: Axes, rows: Sequence[Record]) -> None:
    """A point per step, its loss above and its active neurons below it.

    A loss that would press all others together is a mark at the upper edge.
    """
    losses = np.array([r["ce"] for r in rows])
    least, second, most = np.sort(losses)[[0, max(len(losses) - 2, 0), -1]]
    off = losses > (second if most - second > 2 * (second - least) > 0 else most)
    top = losses[~off].max()
    height = top - least or 1.0
    y = np.where(off, top + 0.45 * height, losses)
    axes.plot(y, "-", color="0.7", lw=0.8)
    axes.plot(np.flatnonzero(~off), y[~off], "ko")
    axes.plot(np.flatnonzero(off), y[off], "k^")
    for k, r in enumerate(rows):
        loss = f"{r['ce']:.3f}" + ("\n(off the scale)" if off[k] else "")
        for text, up, place in ((loss, 6, "bottom"), (f"{r['nnz']:,.0f}", -6, "top")):
            _note(axes, text, (k, y[k]), (0, up), ha="center", va=place)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    if off.any():
        axes.axhline(top + 0.25 * height, color="0.7", ls=":")
        axes.set_yticks([t for t in axes.get_yticks() if t < top + 0.25 * height])
    axes.set_ylim(least - 0.15 * height, y.max() + 0.2 * height)


def _note(axes: Axes, text: str, at: Any, offset: tuple[float, float], **style: Any) -> None:
    """Small text beside a point, on paper of its own so that no line runs through it."""
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    axes.annotate(text, at, offset, textcoords=_POINTS, fontsize=7, bbox=paper, **style)


_POINTS: Any = "offset points"


def _grouped(rows: Iterable[Record], key: str) -> dict[Any, list[Record]]:
    found = defaultdict(list)
    for r in rows:
        found[r[key]].append(r)
    return found


def _family(r: Record) -> tuple[str, bool, bool]:
    return r["key"]["variant"], bool(r["key"]["revive"]), bool(r["key"]["warmup"])


def _first_seed(rows: Iterable[Record]) -> list[Record]:
    return [group[0] for group in _grouped(rows, "name").values()]


def _longest(rows: Sequence[Record]) -> list[Record]:
    """The long runs; where there are none, one run of each name."""
    long = [r for r in rows if r["key"]["length"] > 1]
    return long or _first_seed(rows)[:6]


def _bars(middle: Any, least: Any, most: Any) -> np.ndarray:
    """(2, n) lengths of error bars, down and up."""
    # A mean of equal values may be rounded to beyond them, and lengths must not be negative.
    return np.abs(np.array([least, most]) - np.array(middle))


def _log(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis, with zero on it, where values differ by more than tenfold."""
    values = [float(v) for v in values]
    least, most = min(values, default=1.0), max(values, default=1.0)
    if most > 10 * least:
        scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
        scale("symlog", linthresh=1)
        axis.set_major_formatter("{x:g}")
        limits = axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim
        limits(least / 1.5 if least > 1 else 0, 1.5 * most)


def _nnz(r: Record) -> float:
    return r["nnz"]


def _dead(r: Record) -> float:
    return 100 * sum(e["dead"] for e in r["layer_stats"]) / sum(e["d_ff"] for e in r["layer_stats"])


def _by_l1(rows: Iterable[Record], value: Any) -> tuple[list[float], Any, Any, Any]:
    """Coefficients, and mean, least and most of a value over seeds at each."""
    found = defaultdict(list)
    for r in rows:
        found[r["key"]["l1"]].append(value(r))
    x = sorted(found)
    mean, least, most = ([f(found[c]) for c in x] for f in (np.mean, np.min, np.max))
    return x, mean, least, most


def _where_run(r: Record) -> str:
    return f"{r['mode']} x {r['sequences']}"


def _finish(figure: Figure, path: Path, rows: Sequence[Record], *, legends: bool = True) -> Figure:
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
