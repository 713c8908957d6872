"""The default corpus: the text of the running Python's standard library, read in place."""

import os
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sparsejax.data.sources import TokenSource, array_source
from sparsejax.data.splitting import in_validation
from sparsejax.data.tokenizer import ByteTokenizer

VALIDATION_FRACTION = 0.05
# Third-party packages, tests and caches are no part of the corpus.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
}


def _wanted(relative: str) -> bool:
    *folders, file = relative.split("/")
    # _sysconfigdata*.py records how this one Python was built: paths and compiler flags.
    return (
        file.endswith(".py")
        and not file.startswith("_sysconfigdata")
        and not _SKIPPED_FOLDERS.intersection(folders)
    )


def _library_files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _SKIPPED_FOLDERS]
        for file in files:
            path = Path(folder, file)
            relative = path.relative_to(root).as_posix()
            if _wanted(relative):
                yield relative, path


def stdlib_documents(root: Path | None = None) -> list[tuple[str, bytes]]:
    """(relative path, text) of every module of the standard library, in path order.

    Args:
        root: folder or zip file to read instead of the running Python's library.

    Raises:
        ValueError: no Python source there, as in builds that ship compiled files only.
    """
    if root is None:
        root = Path(sysconfig.get_path("stdlib"))
        if not root.is_dir():  # an embedded Python keeps its library in pythonXY.zip
            root = root.parent / f"python{sysconfig.get_python_version().replace('.', '')}.zip"
    documents: list[tuple[str, bytes]] = []
    if root.is_dir():
        documents = [(relative, path.read_bytes()) for relative, path in _library_files(root)]
    elif zipfile.is_zipfile(root):
        with zipfile.ZipFile(root) as archive:
            documents = [(n, archive.read(n)) for n in archive.namelist() if _wanted(n)]
    documents = sorted((relative, text) for relative, text in documents if text)
    if not documents:
        raise ValueError(
            f"the standard library of this Python has no .py files at {root}, so the corpus "
            f"'stdlib' is empty here; give --data a folder made by experiments/prepare_data.py"
        )
    return documents


def open_stdlib(split: str = "train", root: Path | None = None) -> TokenSource:
    """The standard library as byte tokens, each module ended by 256; nothing is written to disk.

    About 5 % of the modules, chosen by a hash of their path, are the split "val".

    Args:
        split: "train" or "val".
        root: see `stdlib_documents`.

    Raises:
        ValueError: unknown split, or no library source on this machine.
    """
    if split not in ("train", "val"):
        raise ValueError(f"corpus 'stdlib' has no split {split!r}; it has: train, val")
    texts = [
        text
        for relative, text in stdlib_documents(root)
        if in_validation(relative.encode(), VALIDATION_FRACTION) == (split == "val")
    ]
    if not texts:
        raise ValueError(f"split {split!r} of corpus 'stdlib' is empty: too few modules were found")
    tokenizer = ByteTokenizer()
    text_bytes = sum(len(text) for text in texts)
    tokens = np.empty(text_bytes + len(texts), dtype=np.uint16)
    start = 0
    for text in texts:
        tokens[start : start + len(text)] = np.frombuffer(text, dtype=np.uint8)
        tokens[start + len(text)] = tokenizer.eot_id
        start += len(text) + 1
    return array_source(
        tokens,
        name="stdlib",
        split=split,
        tokenizer=tokenizer,
        bytes_per_token=text_bytes / len(tokens),
    )
