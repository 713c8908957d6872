"""Compares training runs step by step: losses, their differences, and activity.

    python experiments/compare_runs.py --runs runs/dense runs/sparse --out figure.png

The first run is the reference: the table beside --out (a .csv of that name) and the printed lines
hold each other run's difference from it. Runs must have logged the same steps.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure

from sparsejax.studies.flags import PICTURES, check_file
from sparsejax.studies.records import write_csv
from sparsejax.training.metrics import read_rows


@dataclasses.dataclass(frozen=True)
class Args:
    """Compares runs.

    Attributes:
      runs: folders with metrics.jsonl, or such files; the first is the reference.
      names: of the runs, in their order; their paths' last parts where left out.
      out: the picture (.png); the table goes beside it.
    """

    runs: tuple[Path, ...]
    out: Path
    names: tuple[str, ...] = ()


def table(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per step: cross-entropy and activity of every run.

    Raises:
      ValueError: runs that logged other steps than the first.
    """
    steps = {name: [row["step"] for row in rows] for name, rows in runs.items()}
    first = next(iter(steps))
    for name, found in steps.items():
        if found != steps[first] or not found:
            raise ValueError(
                f"--runs: {name!r} logged {len(found)} steps {found[:2]}..., {first!r} "
                f"{len(steps[first])} steps {steps[first][:2]}...; compare runs of the same "
                "--steps and --log-every"
            )
    rows = []
    for i, step in enumerate(steps[first]):
        row: dict[str, Any] = {"step": step}
        for name, own in runs.items():
            row |= {f"ce {name}": own[i]["ce"], f"nnz {name}": own[i]["nnz"]}
        rows.append(row)
    return rows


def differences(rows: list[dict[str, Any]], names: list[str]) -> dict[str, tuple[float, float]]:
    """(mean, largest) |difference| of cross-entropy from the first run over the last third."""
    last = rows[-max(1, len(rows) // 3) :]
    found = {}
    for name in names[1:]:
        gaps = [abs(row[f"ce {name}"] - row[f"ce {names[0]}"]) for row in last]
        found[name] = statistics.fmean(gaps), max(gaps)
    return found


def plot(rows: list[dict[str, Any]], names: list[str], path: Path) -> None:
    """Losses, differences from the first run, activity."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, gap, nnz = figure.subplots(1, 3)
    steps = [row["step"] for row in rows]
    for i, name in enumerate(names):
        values = [row[f"ce {name}"] for row in rows]
        line = {"color": f"C{i}", "ls": "-" if i % 2 == 0 else "--", "lw": 1.2, "label": name}
        loss.plot(steps, values, **line)
        nnz.plot(steps, [row[f"nnz {name}"] for row in rows], **line)
        if i:
            gaps = [v - row[f"ce {names[0]}"] for v, row in zip(values, rows, strict=True)]
            gap.plot(steps, gaps, **line)
    gap.axhline(0, color="grey", lw=0.8)
    loss.set(xlabel="step", ylabel="nats per token", title="training loss (cross-entropy)")
    gap.set(xlabel="step", ylabel="nats per token", title=f"difference from {names[0]}")
    nnz.set(xlabel="step", ylabel="active neurons per token and layer", yscale="log")
    for axes in (loss, gap, nnz):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def main(args: Args) -> None:
    """Reads, prints the differences, writes table and picture."""
    if len(args.runs) < 2:
        raise ValueError(f"--runs: expected at least two runs to compare, got {len(args.runs)}")
    if args.names and len(args.names) != len(args.runs):
        raise ValueError(
            f"--names: expected one per run, got {len(args.names)} for {len(args.runs)} runs"
        )
    names = list(args.names) or [path.stem if path.is_file() else path.name for path in args.runs]
    if len(set(names)) < len(names):
        raise ValueError(f"--runs: two runs are called alike, {names}; tell them apart by --names")
    runs = {}
    for name, path in zip(names, args.runs, strict=True):
        file = path if path.is_file() else path / "metrics.jsonl"
        if not file.is_file():
            raise ValueError(f"--runs: {path} is neither a file nor a folder with metrics.jsonl")
        runs[name] = read_rows(file)
    rows = table(runs)
    check_file("--out", args.out, *PICTURES)
    check_file("--out", args.out.with_suffix(".csv"))
    for name, (mean, most) in differences(rows, names).items():
        print(f"{name} from {names[0]}, last third: mean {mean:.4f}, at most {most:.4f} nats")
    write_csv(args.out.with_suffix(".csv"), rows)
    plot(rows, names, args.out)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except ValueError as error:
        raise SystemExit(f"compare_runs.py: {error}") from None
