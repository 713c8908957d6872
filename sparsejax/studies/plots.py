"""Figures of the studies, from their records alone."""

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
_STYLE = {"silu": ("C7", "*"), "relu": ("C0", "o"), "nongated": ("C2", "s")}


def plot_sparsity(rows: Sequence[Record], path: Path) -> None:
    """Six panels: loss, activity, dead neurons by coefficient; where activity is; overfitting."""
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    (loss, activity, dead), (layers, positions, curves) = figure.subplots(2, 3)
    short = [r for r in rows if r["key"]["length"] == 1]
    for name, group in _by_name(short).items():
        key = group[0]["key"]
        color, marker = _STYLE[key["variant"]]
        color = "C1" if key["revive"] else "C3" if key["warmup"] else color
        nnz, ce = (np.array([r[k] for r in group]) for k in ("nnz", "ce"))
        loss.errorbar(
            nnz.mean(), ce.mean(), xerr=_spread(nnz), yerr=_spread(ce), fmt=marker, color=color
        )
        below = key["revive"] or key["variant"] == "nongated"
        at, offset = (nnz.mean(), ce.mean()), (4, -9 if below else 4)
        loss.annotate(name, at, fontsize=6, xytext=offset, textcoords=_POINTS)
    loss.set(xlabel="active neurons per token and layer")
    _log(loss.xaxis, [r["nnz"] for r in short])
    loss.set(ylabel="held-out nats per token", title="quality (bars: range over seeds)")
    families = {
        "gated ReLU": ("relu", False, False),
        "with revival": ("relu", True, False),
        "with L1 warm-up": ("relu", False, True),
        "not gated": ("nongated", False, False),
    }
    for color, (label, family) in zip(("C0", "C1", "C3", "C2"), families.items(), strict=True):
        group = [r for r in short if _family(r) == family and "layer_stats" in r]
        if not group:
            continue
        for axes, value in ((activity, _nnz), (dead, _dead)):
            x, mean, least, most = _by_l1(group, value)
            axes.plot(x, mean, "o-", color=color, label=label, ms=4)
            axes.fill_between(x, least, most, color=color, alpha=0.2)
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
    least = min((p["held_out"] for r in _longest(rows) for p in r["curve"]), default=0.0)
    curves.set_ylim(top=min(curves.get_ylim()[1], least + 1))  # the steep beginning says little
    curves.set(xlabel="million tokens", ylabel="nats per token")
    curves.set(title="held-out loss (least marked), training loss (dashed)")
    _finish(figure, path, rows)


def _where(rows: Sequence[Record], layers: Axes, positions: Axes) -> None:
    """Activity by layer and position of the gated ReLU runs of the first seed."""
    group = [r for r in rows if _family(r) == ("relu", False, False) and "layer_stats" in r]
    group = sorted(_first_seed(group), key=lambda r: r["key"]["l1"])
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(group)))
    for color, r in zip(shades, group, strict=True):
        label = f"L1 {r['key']['l1']:g}"
        x = [entry["layer"] for entry in r["layer_stats"]]
        layers.plot(
            x, [entry["mean"] for entry in r["layer_stats"]], "o-", color=color, label=label
        )
        at = [1 + (entry["from"] + entry["to"]) / 2 for entry in r["positions"]]
        positions.plot(at, [entry["nnz"] for entry in r["positions"]], color=color, label=label)
    layers.set(xlabel="layer", ylabel="active neurons per token", title="by layer")
    layers.xaxis.set_major_locator(MaxNLocator(integer=True))
    positions.set(xlabel="position in the sequence, from 1", xscale="log", title="by position")
    for axes in (layers, positions):
        _log(axes.yaxis, [y for line in axes.lines for y in np.asarray(line.get_ydata())])


def plot_speed(rows: Sequence[Record], path: Path) -> None:
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
        speed.bar(x, [r["ratio_to_fastest_dense"] for r in found.values()], label=label, **style)
        joules = [r.get("energy_ratio") for r in found.values()]
        if all(j is not None for j in joules):
            energy.bar(x, joules, label=label, **style)
    for axes, title in (
        (speed, "speed over the fastest dense form"),
        (energy, "energy per token over that of the fastest dense form"),
    ):
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_ylim(top=1.35 * axes.get_ylim()[1])  # room for the legend
        axes.set(title=title)
    if not energy.patches:
        energy.text(0.5, 0.5, "not measured", ha="center", transform=energy.transAxes)
    _finish(figure, path, rows)


def plot_size(rows: Sequence[Record], published: Mapping[str, Mapping[str, float]], path: Path):
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
        error = [gains - low, np.array(high) - gains] if known else None
        axes.errorbar(x, gains, yerr=error, fmt="o-", label="here (bars: least to most)")
        axes.axhline(0, color="black", lw=0.8)
        axes.set_xticks(range(len(sizes)), sizes)
        axes.set(xlabel="size", ylabel="% more tokens per second", title=mode)
    _finish(figure, path, rows)


def plot_fusion(rows: Sequence[Record], windows: Sequence[Record], path: Path) -> None:
    """Held-out loss and decode time against feed-forward steps saved; windows of whole layers."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    loss, latency, parallel = figure.subplots(1, 3)
    families = defaultdict(list)
    for r in rows:
        families[r["family"]].append(r)
    marks = {"fuse": "o-", "fuse, last layer in": "^-", "fuse, own norms": "s--"}
    marks |= {"remove": "x-", "reverse": "d:", "base": "k*", "fuse, distilled": "P"}
    marks |= {"remove, distilled": "X", "base, distilled": "*"}
    for family, group in families.items():
        if family in ("parent", "cut"):
            label = {"parent": "parent", "cut": "parent without these attentions"}[family]
            loss.axhline(group[0]["ce"], color=f"{0.6 * (family == 'cut')}", ls=":", label=label)
            continue
        group = sorted(group, key=lambda r: r["order_of"])
        x = [r["order_of"] for r in group]
        loss.plot(x, [r["ce"] for r in group], marks[family], label=family, ms=5)
        timed = [r for r in group if r.get("decode_ms") is not None]
        if timed:
            latency.errorbar(
                [r["saved"] for r in timed],
                [r["decode_ms"] for r in timed],
                yerr=[
                    [r["decode_ms"] - r["decode_least"] for r in timed],
                    [r["decode_most"] - r["decode_ms"] for r in timed],
                ],
                fmt=marks[family],
                label=family,
                ms=5,
            )
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
    _finish(figure, path, rows)


def plot_waterfall(rows: Sequence[Record], path: Path) -> None:
    """Decode and prefill time after each step, as what the step took or added; loss beside it."""
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    decode, prefill, loss = figure.subplots(1, 3)
    names = [r["step"] for r in rows]
    for axes, mode, label in (
        (decode, "decode", "ms per decode step, one row"),
        (prefill, "prefill", "ms per prefill"),
    ):
        before = 0.0
        for k, r in enumerate(rows):
            now = r[f"{mode}_ms"]
            change = now - before if k else now
            color = "C7" if k == 0 else "C2" if change < 0 else "C3"
            axes.bar(k, abs(change), bottom=min(now, before) if k else 0, color=color)
            text = f"{now:.3g}" if k == 0 else f"{100 * change / rows[0][f'{mode}_ms']:+.1f} %"
            axes.annotate(text, (k, max(now, before)), ha="center", fontsize=7, va="bottom")
            before = now
        axes.bar(len(rows), before, color="C7")
        axes.annotate(f"{before:.3g}", (len(rows), before), ha="center", fontsize=7, va="bottom")
        axes.set(ylabel=label, title=f"{mode}: what each step bought")
        axes.set_xticks(range(len(rows) + 1), [*names, "result"], rotation=40, ha="right")
    loss.plot(range(len(rows)), [r["ce"] for r in rows], "ko-")
    for k, r in enumerate(rows):
        note = f"nnz {r['nnz']:.0f}"
        loss.annotate(note, (k, r["ce"]), fontsize=7, xytext=(0, 6), textcoords=_POINTS)
    loss.set(ylabel="held-out nats per token", title="what it cost")
    loss.set_xticks(range(len(rows)), names, rotation=40, ha="right")
    for axes in (decode, prefill, loss):
        axes.tick_params(labelsize=8)
    _finish(figure, path, rows, legends=False)


_POINTS: Any = "offset points"


def _by_name(rows: Iterable[Record]) -> dict[str, list[Record]]:
    return _grouped(rows, "name")


def _grouped(rows: Iterable[Record], key: str) -> dict[Any, list[Record]]:
    found = defaultdict(list)
    for r in rows:
        found[r[key]].append(r)
    return found


def _family(r: Record) -> tuple[str, bool, bool]:
    return r["key"]["variant"], bool(r["key"]["revive"]), bool(r["key"]["warmup"])


def _first_seed(rows: Iterable[Record]) -> list[Record]:
    return [group[0] for group in _by_name(rows).values()]


def _longest(rows: Sequence[Record]) -> list[Record]:
    """The long runs; where there are none, one run of each name."""
    long = [r for r in rows if r["key"]["length"] > 1]
    return long or _first_seed(rows)[:6]


def _spread(values: np.ndarray) -> Any:
    mean = values.mean()
    return np.array([[mean - values.min()], [values.max() - mean]])


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


def _finish(figure: Figure, path: Path, rows: Sequence[Record], *, legends: bool = True) -> None:
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
