"""Writes a corpus folder whole or not at all."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np


class SplitWriter:
    """One split's file of ids, with what meta.json says of it.

    Args:
        path: file to write.
        eot_id: written after each document.
        dtype: of the ids.
    """

    def __init__(self, path: Path, eot_id: int, dtype: np.dtype):
        self._path = path
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._eot = np.asarray([eot_id], dtype=dtype)
        self.documents = 0
        self._tokens = 0
        self._text_bytes = 0
        self._max_id = eot_id
        self._eot_in_text = 0

    def write(self, ids: np.ndarray, text_bytes: int, last: bool) -> None:
        """Adds ids of a document; `last` ends the document.

        Args:
            ids: (n,) of the file's dtype.
            text_bytes: UTF-8 bytes of the text that they encode.
            last: nothing of this document follows.
        """
        if len(ids):
            self._max_id = max(self._max_id, int(ids.max()))
            self._eot_in_text += int(np.count_nonzero(ids == self._eot[0]))
        for part in (ids, self._eot) if last else (ids,):
            self._tokens += len(part)
            self._digest.update(part.data)
            self._file.write(part.data)
        self._text_bytes += text_bytes
        self.documents += last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def describe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The closed file's entries in `splits` and `files` of meta.json."""
        text_tokens = self._tokens - self.documents
        split = {
            "file": self._path.name,
            "documents": self.documents,
            "tokens": self._tokens,
            "text_bytes": self._text_bytes,
            "bytes_per_token": self._text_bytes / text_tokens if text_tokens else None,
            "bytes_per_token_incl_eot": self._text_bytes / self._tokens if self._tokens else None,
            "max_id": self._max_id,
            "eot_in_text": self._eot_in_text,
        }
        return split, {"bytes": self._path.stat().st_size, "sha256": self._digest.hexdigest()}


def check_out(out: Path, overwrite: bool) -> None:
    """Refuses a place where something lies that would be lost.

    Args:
        out: folder to make.
        overwrite: a corpus folder there may be replaced; anything else still may not.

    Raises:
        ValueError: with what lies there.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"out is {out}, which is a file; give a new folder")
    entries = sorted(entry.name for entry in out.iterdir())
    if not entries:
        return
    if not overwrite:
        raise ValueError(
            f"out folder {out} is not empty; choose another, or replace it with --overwrite"
        )
    known = ("meta.json", "tokenizer.json", "train.bin", "val.bin")
    foreign = [name for name in entries if name not in known]
    if foreign or "meta.json" not in entries:
        raise ValueError(
            f"out folder {out} is not replaced: it is no folder made by this script, it holds "
            f"{', '.join((foreign or entries)[:8])}. Choose another"
        )


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out` if the block ends well, else vanishes.

    Args:
        out: the final place; `check_out` has allowed it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}.unfinished-", dir=out.parent))
    replaced = None
    try:
        yield made
        umask = os.umask(0)  # reading it means setting it
        os.umask(umask)
        made.chmod(0o777 & ~umask)  # temporary folders are private
        if out.is_dir() and any(out.iterdir()):
            replaced = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent))
            out.rename(replaced)
        made.rename(out)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    if replaced is not None:
        shutil.rmtree(replaced)
