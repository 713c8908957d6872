"""Finished measurements of a study: one JSON object per line, and tables made of them.

The file is what a study resumes from: what it holds is not measured again. It is small and belongs
to the repository, unlike folders of runs.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

Record = dict[str, Any]


class Records:
    """The records of one study.

    A record is found by its "key", a dict of JSON values: what was measured, with all settings that
    the result depends on.

    Args:
      path: the .jsonl file; made when the first record is added.

    Raises:
      ValueError: a line that is not a record.
    """

    def __init__(self, path: Path):
        self.path = path
        self._rows: list[Record] = []
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
            try:
                record = json.loads(line)
                record["key"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}: line {number} is no record; remove the line") from None
            self._rows.append(record)

    def find(self, key: Mapping[str, Any]) -> Record | None:
        """The newest record of this very key, or None."""
        wanted = _plain(key)
        return next((r for r in reversed(self._rows) if r["key"] == wanted), None)

    def add(self, key: Mapping[str, Any], result: Mapping[str, Any]) -> Record:
        """Appends `result` with the key and `about()`."""
        record = _plain({"key": key} | about() | dict(result))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._rows.append(record)
        return record

    def all(self, **key: Any) -> list[Record]:
        """The newest record of every key that has these entries, in the order of the file."""
        wanted = _plain(key)
        found: dict[str, Record] = {}
        for record in self._rows:
            if all(record["key"].get(k) == v for k, v in wanted.items()):
                found[json.dumps(record["key"], sort_keys=True)] = record
        return list(found.values())


class Budget:
    """Seconds within which new work may begin.

    Args:
      seconds: from now on; None for no limit.
    """

    def __init__(self, seconds: float | None):
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def spent(self) -> bool:
        """Whether nothing new may begin."""
        return self._end is not None and time.monotonic() >= self._end


def about() -> dict[str, Any]:
    """Device, versions and commit that a measurement is of."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "flax": importlib.metadata.version("flax"),
        "git": found.stdout.strip(),
    }


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows, whose columns may differ, under all their names; floats with 6 digits."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _cell(value) for name, value in row.items()})


def check_same_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Passes where there is no table, or one whose rows have these settings as columns.

    Args:
      path: the .csv file that is to be written anew.
      settings: column -> value.

    Raises:
      ValueError: a table of other settings, which would be lost.
    """
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        then = next(csv.DictReader(file), None)
    if then is None:
        return
    now = {name: str(_cell(value)) for name, value in settings.items()}
    if other := [name for name in now if then.get(name) != now[name]]:
        shown = [f"{name} {then.get(name, 'not told')!r} vs {now[name]!r}" for name in other[:5]]
        raise ValueError(
            f"{path} holds results of other settings (there vs now): {'; '.join(shown)}. Name "
            "another --results, or delete the file"
        )


def _cell(value: Any) -> Any:
    return "" if value is None else format(value, ".6g") if isinstance(value, float) else value


def _plain(value: Any) -> Any:
    """As JSON gives it back, so that a key compares equal after reading."""
    return json.loads(json.dumps(value, default=str))
