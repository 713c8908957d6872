"""`metrics.jsonl`: one JSON object per logged step, in agreement with the checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

Row = dict[str, Any]


class MetricsLog:
    """Appends rows to a jsonl file, a line at a time; process 0 writes, others do nothing.

    A context manager, which closes the file.

    Args:
      path: the file.
      resume_step: keep earlier rows up to this step and drop what an interrupted run logged after
        its last checkpoint; None starts an empty file.
    """

    def __init__(self, path: Path, resume_step: int | None):
        self._file = None
        self.last_step = 0  # of the rows kept
        if jax.process_index():
            return
        rows = [] if resume_step is None else self._earlier_rows(path)
        kept = [row for row in rows if row["step"] <= (resume_step or 0)]
        self.last_step = kept[-1]["step"] if kept else 0
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, path)
        self._file = path.open("a", buffering=1)

    def _earlier_rows(self, path: Path) -> list[Row]:
        try:
            return read_rows(path)
        except ValueError as error:
            aside = path.with_suffix(".damaged.jsonl")
            shutil.copy(path, aside)
            warnings.warn(f"{error}; a copy is kept as {aside.name}", stacklevel=3)
            return read_rows(path, skip_damaged=True)

    def write(self, row: Row) -> None:
        """Appends one row."""
        if self._file:
            self._file.write(json.dumps(row) + "\n")

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._file:
            self._file.close()


def read_rows(path: Path, *, skip_damaged: bool = False) -> list[Row]:
    """The rows of a metrics file; a last line cut short by a crash is left out.

    Raises:
      ValueError: another line is not JSON, unless `skip_damaged`.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines) and not skip_damaged:
                raise ValueError(f"{path}: line {number} is not JSON ({error})") from None
    return rows


def to_row(step: int, metrics: dict[str, Any], tokens_per_s: float) -> Row:
    """Device metrics of one step as JSON values: loss, the objective's terms, then the rest."""
    values = {k: np.asarray(v).tolist() for k, v in metrics.items()}
    activity = ("l1", "nnz", "nnz_per_layer", "sparse_layers", "dead_fraction", "grad_norm")
    apart = {"loss", *activity, "learning_rate", "targets"}
    order = ("loss", *(k for k in values if k not in apart), *activity)
    row = {"step": step} | {k: values[k] for k in order}
    return row | {"learning_rate": values["learning_rate"], "tokens_per_s": tokens_per_s}


def headline(row: Row) -> str:
    """The objective's scalar terms, as the progress bar shows them: "ce 1.523  kl 0.012"."""
    names = list(row)[2 : list(row).index("l1")]
    return "  ".join(f"{k} {row[k]:.3f}" for k in names if isinstance(row[k], float))


class Speed:
    """Tokens per second between calls of `lap`."""

    def __init__(self, tokens_per_step: int, step: int):
        self._tokens = tokens_per_step
        self._step, self._time = step, time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside (an evaluation, a checkpoint) is not counted as training time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._time += time.perf_counter() - began

    def lap(self, step: int) -> float:
        """Tokens per second since the last lap, which ended after another step."""
        now = time.perf_counter()
        rate = (step - self._step) * self._tokens / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        return rate
