"""Documents out of txt, jsonl and parquet files, each with a place to name in errors.

txt: the file is one document. jsonl: one object a line, its text under a key. parquet: one row a
document, its text in a column. Texts are kept exactly (line ends included).
"""

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sparsejax.data.sources import DataNotFoundError

SUFFIXES = (".txt", ".jsonl", ".parquet")
_PARQUET_ROWS = 1024


class Document(NamedTuple):
    """A text, where it came from ("b.jsonl:17"), and the bytes of input read with it."""

    text: str
    origin: str
    input_bytes: int


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """Files named by paths, folders (searched deep for .txt, .jsonl, .parquet) and globs.

    Args:
        inputs: in the order to read; files of one folder or glob are sorted by path.

    Returns:
        Each file once, at its first place.

    Raises:
        ValueError: an input that matches nothing, or a file of another kind.
    """
    files: dict[Path, None] = {}
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            found = [p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()]
        elif path.is_file():
            found = [path]
        else:
            found = [Path(p) for p in glob.glob(str(given), recursive=True) if Path(p).is_file()]
        if not found:
            raise DataNotFoundError(
                f"input {str(given)!r} matched no file; give a file, a folder with "
                f"{', '.join(SUFFIXES)} files, or a glob"
            )
        for file in sorted(found):
            if file.suffix not in SUFFIXES:
                raise ValueError(
                    f"{file} is of no known kind; expected a name ending in {', '.join(SUFFIXES)}"
                )
            files[file] = None
    if not files:
        raise DataNotFoundError("no inputs; give at least one file, folder or glob")
    return list(files)


def read_documents(file: Path, text_key: str = "text") -> Iterator[Document]:
    """Yields the documents of one file, empty ones included.

    Args:
        file: a .txt, .jsonl or .parquet file.
        text_key: key (jsonl) or column (parquet) that holds the text.

    Raises:
        ValueError: text that is not UTF-8, a line that is not JSON, a missing key, or a value that
            is no text; the message names file and line (row).
        ImportError: a parquet file without pyarrow installed.
    """
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    return readers[file.suffix](file, text_key)


def _checked_text(text: object, origin: str, text_key: str, input_bytes: int) -> Document:
    if not isinstance(text, str):
        raise ValueError(f"{origin}: {text_key!r} is {text!r:.60}, expected a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{origin}: the text has a lone surrogate {text[error.start]!a} at character "
            f"{error.start}, which is no Unicode text"
        ) from error
    return Document(text, origin, input_bytes)


def _decode(data: bytes, origin: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{origin}: not UTF-8 at byte {error.start} (0x{data[error.start]:02x}); convert it"
        ) from error


def _read_txt(file: Path, text_key: str) -> Iterator[Document]:
    data = file.read_bytes()
    yield Document(_decode(data, str(file)), str(file), len(data))


def _read_jsonl(file: Path, text_key: str) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, data in enumerate(lines, start=1):
            origin = f"{file}:{number}"
            line = _decode(data, origin)
            if number == 1:
                line = line.removeprefix("\ufeff")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{origin}: not valid JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{origin}: expected a JSON object, got {line.strip():.60}")
            if text_key not in record:
                raise ValueError(
                    f"{origin}: no key {text_key!r}; this line has: "
                    f"{', '.join(map(repr, record)) or '(none)'}. Choose one with --text-key"
                )
            yield _checked_text(record[text_key], origin, text_key, len(data))


def _read_parquet(file: Path, text_key: str) -> Iterator[Document]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ImportError(
            f"reading {file} needs pyarrow; install it with: pip install 'sparsejax[hf]'"
        ) from error
    try:
        table = pq.ParquetFile(file)
    except pa.ArrowException as error:
        raise ValueError(f"{file} is not a readable parquet file: {error}") from error
    with table:
        if text_key not in table.schema_arrow.names:
            raise ValueError(
                f"{file}: no column {text_key!r}; it has: {', '.join(table.schema_arrow.names)}. "
                f"Choose one with --text-key"
            )
        row, rows, size, read = 0, table.metadata.num_rows, file.stat().st_size, 0
        for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[text_key]):
            for text in batch.column(0).to_pylist():
                row += 1
                share, read = size * row // rows - read, size * row // rows
                yield _checked_text(text, f"{file}, row {row}", text_key, share)
