"""The special ids that config.json and generation_config.json of a Hugging Face folder name.

No part of a model here uses them, but programs that read an exported folder do: they are carried
along as they were found. A run keeps them in `tokenizer/token_ids.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
CONFIG, GENERATION = "config.json", "generation_config.json"
FILE = "token_ids.json"

# By file, and then by key. A file that is absent is absent here too, as a key is.
TokenIds = dict[str, dict[str, Any]]


def read_token_ids(folder: Path) -> TokenIds:
    """Those of a Hugging Face folder, or of a run's `tokenizer/`; empty where there are none.

    Raises:
      ValueError: a file is not valid JSON.
    """
    if (folder / FILE).is_file():
        return _read(folder / FILE)
    found: TokenIds = {}
    for name in (CONFIG, GENERATION):
        if (folder / name).is_file():
            values = _read(folder / name)
            found[name] = {key: values[key] for key in KEYS if key in values}
    return found


def end_ids(ids: TokenIds) -> list[int]:
    """Ids that end a text: those for generation where they are named, else the model's."""
    for file in (GENERATION, CONFIG):
        value = ids.get(file, {}).get("eos_token_id")
        if value is not None:
            found = value if isinstance(value, list) else [value]
            return sorted({i for i in found if isinstance(i, int) and i >= 0})
    return []


def write_token_ids(folder: Path, ids: TokenIds) -> None:
    """Writes what `read_token_ids` gives back; nothing where there is nothing."""
    if ids:
        (folder / FILE).write_text(json.dumps(ids, indent=1) + "\n", encoding="utf-8")


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no JSON object")
    return values
