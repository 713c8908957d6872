"""Figures of sparsity, speed and size, from records alone: saved to `path`, and returned."""

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

from sparsejax.studies.figures import Record, bars, finish, grouped, log, note

# Of a family of runs (variant, revival, warm-up): label, colour, marker.
_FAMILIES = {
    ("silu", False, False): ("SiLU", "C7", "*"),
    ("relu", False, False): ("gated ReLU", "C0", "o"),
    ("relu", True, False): ("with revival", "C1", "o"),
    ("relu", False, True): ("with L1 warm-up", "C3", "o"),
    ("nongated", False, False): ("not gated", "C2", "s"),
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
    log(loss.xaxis, [r["nnz"] for r in short])
    for axes in (activity, dead):
        axes.set_xscale("symlog", linthresh=1e-5)
        axes.set(xlabel="L1 coefficient")
    log(activity.yaxis, [r["nnz"] for r in short])
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
    return finish(figure, path, rows)


def _quality(axes: Axes, group: Sequence[Record], label: str, style: str, color: str) -> None:
    """Loss against activity of a family, a point per coefficient."""
    coefficients, *x = _by_l1(group, _nnz)
    _, *y = _by_l1(group, lambda r: r["ce"])
    style_of: Any = {"fmt": style, "color": color, "lw": 0.8, "label": label}
    axes.errorbar(x[0], y[0], xerr=bars(*x), yerr=bars(*y), **style_of)
    if group[0]["key"]["variant"] == "silu":
        return
    for l1, *at in zip(coefficients, x[0], y[0], strict=True):
        # Beside the bars, and to the other side where another family's points lie close.
        left = _family(group[0]) == ("relu", False, False) and l1 > 0
        offset, side = ((-5, 0), "right") if left else ((5, 0), "left")
        note(axes, f"{l1:g}", at, offset, color=color, va="center", ha=side)


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
        log(axes.yaxis, [y for line in axes.lines for y in np.asarray(line.get_ydata())])


def plot_speed(rows: Sequence[Record], path: Path) -> Figure:
    """Ratio to the fastest dense form per mode: whole model, and without dead neurons.

    Hatched bars are of engines picked per layer, where they were measured. Lines go from the dense
    form's least time over the model's most to its most over the model's least.
    """
    sparse = [r for r in rows if r["variant"] in ("sparse_relu", "picked")]
    names = list(dict.fromkeys(_where_run(r) for r in sparse))
    kinds = list(dict.fromkeys(map(_speed_kind, sparse)))
    checkpoints = list(dict.fromkeys(checkpoint for checkpoint, *_ in kinds))
    measured = {(_where_run(r), _speed_kind(r)) for r in sparse}
    dense = {}  # the fastest dense form of each case
    for r in rows:
        case = (_where_run(r), *_speed_kind(r)[:2])
        if r["variant"].startswith("dense") and r["ms"] <= dense.get(case, r)["ms"]:
            dense[case] = r
    # Numbers stand above bars.
    figure = Figure(figsize=(max(11.0, 3 + 2 * len(kinds)), 4.5), layout="constrained")
    speed, energy = figure.subplots(1, 2)
    width = 0.8 / max(len(kinds), 1)
    for k, (checkpoint, pruned, variant) in enumerate(kinds):
        found = {_where_run(r): r for r in sparse if _speed_kind(r) == kinds[k]}
        # A group's bars stand around its name, those that were not measured left out.
        groups = [[i for i, kind in enumerate(kinds) if (n, kind) in measured] for n in found]
        places = [g.index(k) - (len(g) - 1) / 2 for g in groups]
        x = np.array([names.index(n) for n in found]) + np.array(places) * width
        label = f"{checkpoint}{', dead neurons dropped' if pruned else ''}"
        label += ", engines picked" if variant == "picked" else ""
        label += f" (nnz {np.mean(next(iter(found.values()))['nnz_seen']):.0f})"  # first column's
        style: dict[str, Any] = {"color": f"C{checkpoints.index(checkpoint)}", "width": width}
        style |= {"alpha": 0.55 if pruned else 1.0}
        style |= {"hatch": "///", "edgecolor": "white"} if variant == "picked" else {}
        ratios = [r["ratio_to_fastest_dense"] for r in found.values()]
        theirs = [dense[(name, checkpoint, pruned)] for name in found]
        ends = [
            np.array(
                [d[f"ms_{a}"] / r[f"ms_{b}"] for d, r in zip(theirs, found.values(), strict=True)]
            )
            for a, b in (("min", "max"), ("max", "min"))
        ]
        speed.bar(x, ratios, yerr=bars(ratios, *ends), label=label, **style)
        for at, top, ratio, r in zip(x, ends[1], ratios, found.values(), strict=True):
            note = f"{ratio:.2f}\n{r['sparse_layers']:g}/{len(r['d_ff'])}"
            # Clear of the line at 1.
            speed.annotate(note, (at, max(top, 1.01)), ha="center", va="bottom", fontsize=7)
        joules = [r.get("energy_ratio") for r in found.values()]
        if all(j is not None for j in joules):
            energy.bar(x, joules, label=label, **style)
    for axes, title in (
        (speed, "speed over the fastest dense form of the same model\n(n/m layers sparse)"),
        (energy, "energy per token over that of\nthe fastest dense form of the same model"),
    ):
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xticks(range(len(names)), names, fontsize=8)
        # Room for the legend.
        axes.set_ylim(top=max(1.35, 1.1 + 0.1 * len(kinds)) * axes.get_ylim()[1])
        axes.set(title=title, xlabel="what is run x rows", ylabel="ratio")
    if not energy.patches:
        energy.text(0.5, 0.5, "not measured", ha="center", transform=energy.transAxes)
    return finish(figure, path, rows)


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
        error = bars(gains, low, high) if known else None
        axes.errorbar(
            x, gains, yerr=error, fmt="o-", label="here (dense least / most to most / least)"
        )
        axes.axhline(0, color="black", lw=0.8)
        axes.set_xticks(range(len(sizes)), sizes)
        axes.set_ylim(top=1.25 * axes.get_ylim()[1])  # room for the legend
        axes.set(xlabel="size", ylabel="% more tokens per second", title=mode)
    return finish(figure, path, rows)


def _family(r: Record) -> tuple[str, bool, bool]:
    return r["key"]["variant"], bool(r["key"]["revive"]), bool(r["key"]["warmup"])


def _first_seed(rows: Iterable[Record]) -> list[Record]:
    return [group[0] for group in grouped(rows, "name").values()]


def _longest(rows: Sequence[Record]) -> list[Record]:
    """The long runs; where there are none, one run of each name."""
    long = [r for r in rows if r["key"]["length"] > 1]
    return long or _first_seed(rows)[:6]


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


def _speed_kind(r: Record) -> tuple[str, bool, str]:
    return r["checkpoint"], r["pruned"], r["variant"]


def _where_run(r: Record) -> str:
    return f"{r['mode']} x {r['sequences']}"
