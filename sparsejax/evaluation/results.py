"""Results of an evaluation as one JSON file, up to date after each part of it."""

from __future__ import annotations

import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import jax

from sparsejax.evaluation.curve import write_text
from sparsejax.evaluation.models import EvalModel


class Results:
    """Prints each part as it is done, and keeps a file up to date; a context manager.

    The file says "unfinished" until the context ends, and then "finished" or, beside "unfinished",
    the "reason". In a launch process 0 alone prints and writes.
    """

    def __init__(self, out: Path | None, model: EvalModel, settings: dict[str, Any]):
        """Entering the context writes the file for the first time.

        Args:
          out: a .json file; None writes none.
          model: what is evaluated.
          settings: JSON values, kept under "flags".
        """
        self._out, self._began = out, time.perf_counter()
        self._values: dict[str, Any] = {
            "status": "unfinished",
            "model": {"path": model.name, "step": model.step, "dtype": model.config.dtype},
            "flags": settings,
            "device": f"{model.mesh.size} x {jax.devices()[0].device_kind}",
            "versions": {n: importlib.metadata.version(n) for n in ("jax", "flax")},
        }

    def add(self, name: str, values: dict[str, Any], line: str) -> None:
        """Merges `values` into the part `name`, writes the file, and prints `line`."""
        self._values.setdefault(name, {}).update(values)
        self._write()
        if jax.process_index() == 0:
            print(line, flush=True)

    def __enter__(self) -> Results:
        """Writes the file."""
        self._write()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        """Writes how it ended."""
        self._values["seconds"] = time.perf_counter() - self._began
        if error is None:
            self._values["status"] = "finished"
        else:
            self._values["reason"] = str(error) or type(error).__name__
        self._write()

    def _write(self) -> None:
        if self._out is not None and jax.process_index() == 0:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._out, json.dumps(self._values, indent=1, default=str) + "\n")
