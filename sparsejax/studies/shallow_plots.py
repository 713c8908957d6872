"""Figures of models made shallower, from records alone: saved to `path`, and returned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparsejax.studies.figures import Record, bars, finish, grouped, note

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
            latency.errorbar(saved, times[0], yerr=bars(*times), label=family, **style)
    loss.set(xlabel="feed-forward steps saved (reverse: by the same group)")
    loss.set(ylabel="held-out nats per token", title="quality, untrained but for 'distilled'")
    latency.set(xlabel="feed-forward steps saved", ylabel="ms per decode step, one row")
    latency.set(title="latency (bars: least to most)")
    for length, group in grouped(windows, "length").items():
        counts = [r["count"] for r in group]
        parallel.plot(counts, [r["ce"] for r in group], "o-", label=f"{length} layers each")
    parallel.set(xlabel="windows of whole layers side by side", ylabel="held-out nats per token")
    parallel.set(title="full-block parallelisation")
    for axes in (loss, latency, parallel):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(figure, path, rows)


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
        error = bars(times, *ends)[last]
        axes.errorbar(x, [*times, times[-1]], yerr=error, fmt="none", ecolor="black", lw=0.8)
        axes.set(ylabel=label, title=f"{mode}: what each step bought, % of the first bar")
        axes.set_xticks(x, [*names, "result"], rotation=40, ha="right")
    _losses(loss, rows)
    loss.set(ylabel="held-out nats per token", title="what it cost (below: active neurons)")
    loss.set_xticks(range(len(rows)), names, rotation=40, ha="right")
    for axes in (decode, prefill, loss):
        axes.tick_params(labelsize=8)
    return finish(figure, path, rows, legends=False)


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
            note(axes, text, (k, y[k]), (0, up), ha="center", va=place)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    if off.any():
        axes.axhline(top + 0.25 * height, color="0.7", ls=":")
        axes.set_yticks([t for t in axes.get_yticks() if t < top + 0.25 * height])
    axes.set_ylim(least - 0.15 * height, y.max() + 0.2 * height)
