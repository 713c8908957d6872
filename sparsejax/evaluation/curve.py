"""Loss by position in the window, as a table and a picture."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from sparsejax.evaluation.perplexity import Perplexity


def write_curve(result: Perplexity, folder: Path, name: str = "loss_by_position") -> list[Path]:
    """Writes {name}.csv (position, tokens, nats_per_token) and {name}.png; returns their paths.

    A token at position p was predicted from p + 1 tokens of its window. Positions where none was
    scored are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    positions = np.flatnonzero(result.position_tokens)
    tokens = result.position_tokens[positions]
    nats = result.position_nats[positions] / tokens
    table, picture = folder / f"{name}.csv", folder / f"{name}.png"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("position", "tokens", "nats_per_token"))
    writer.writerows(zip(positions.tolist(), tokens.tolist(), nats.tolist(), strict=True))
    write_text(table, text.getvalue())

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(positions + 1, nats, lw=0.6, alpha=0.5, color="tab:blue", label="each position")
    middles, means = _octaves(positions, tokens, nats)
    axes.plot(middles, means, color="black", marker="o", ms=3, lw=1.5, label="mean of a range")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="tokens of context in the window",
        ylabel="nats per token",
        title=f"Loss by position, {result.scored:,} tokens",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=120)
    return [table, picture]


def write_text(file: Path, text: str) -> None:
    """Writes a file that is there whole or not at all."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def _octaves(
    positions: np.ndarray, tokens: np.ndarray, nats: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Means over four ranges per power of two: middles of their contexts, and losses."""
    ranges = np.floor(4 * np.log2(positions + 1)).astype(int)
    weights = np.bincount(ranges, tokens)
    used = weights > 0
    middles = np.bincount(ranges, tokens * np.log2(positions + 1))[used] / weights[used]
    return 2.0**middles, np.bincount(ranges, tokens * nats)[used] / weights[used]
