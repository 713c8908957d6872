"""A tokenised corpus on disk: `meta.json`, `tokenizer.json` and a flat file of ids per split.

`meta.json` holds `vocab_size`, `eot_id`, `dtype` ("<u2" or "<u4", little-endian),
`splits.{name}` with `file`, `tokens` and `text_bytes`, and `files.{file}.sha256`; further keys are
free. `prefix` lists the ids that a converted model has in front of every text (absent: none). Each
document's ids are followed by one `eot_id`; there is no header and no padding.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from sparsejax.data.sources import DataNotFoundError, TokenSource, check_ids, make_fingerprint
from sparsejax.data.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer

BYTE_TOKENIZER = "bytes"
# Read whole on opening up to this size (about a second); every batch is checked besides.
FULL_CHECK_BYTES = 1 << 30
_CHUNK_TOKENS = 1 << 23


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest dtype of the format that holds every id: uint16, or uint32 beyond 65536 ids."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def read_meta(path: Path) -> dict[str, Any]:
    """The folder's `meta.json`.

    Raises:
        ValueError: not a folder, no meta.json, not JSON, or without the keys of the format.
    """
    if not path.is_dir():
        raise ValueError(
            f"{path} is a file; a corpus is a folder. Make one with: python "
            f"experiments/prepare_data.py --inputs {path} --tokenizer tokenizer.json --out FOLDER"
        )
    file = path / "meta.json"
    if not file.is_file():
        raise DataNotFoundError(
            f"{path} has no meta.json; expected a folder made by experiments/prepare_data.py"
        )
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("splits"), dict):
        raise ValueError(f"{file} has no object 'splits'; is it of another format?")
    for key in ("vocab_size", "eot_id"):
        if not isinstance(meta.get(key), int):
            raise ValueError(f"{file} needs an integer {key!r}, got {meta.get(key)!r}")
    if not 0 <= meta["eot_id"] < meta["vocab_size"]:
        raise ValueError(
            f"{file}: eot_id is {meta['eot_id']}, outside vocab_size {meta['vocab_size']}"
        )
    return meta


def _meta_dtype(meta: dict[str, Any], file: Path) -> np.dtype:
    """`dtype` of meta.json, where words may follow: "<u2 (little-endian uint16)"."""
    text = str(meta.get("dtype", token_dtype(meta["vocab_size"]).str))
    known = {"<u2": "<u2", "uint16": "<u2", "<u4": "<u4", "uint32": "<u4"}
    word = text.split()[0] if text.split() else ""
    if word not in known:
        raise ValueError(f"{file}: dtype is {text!r}; expected '<u2' (uint16) or '<u4' (uint32)")
    return np.dtype(known[word])


def open_folder_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a corpus folder; its tokens are not read.

    Raises:
        ValueError: no folder of the format, or its tokenizer is missing or does not belong to it.
    """
    meta = read_meta(path)
    if meta.get("tokenizer") == BYTE_TOKENIZER:
        return ByteTokenizer()
    file = path / "tokenizer.json"
    if not file.is_file():
        raise DataNotFoundError(f"{path} has no tokenizer.json; copy the one its tokens came from")
    prefix = meta.get("prefix", [])
    if not isinstance(prefix, list) or not all(type(i) is int for i in prefix):
        raise ValueError(f"{path / 'meta.json'}: prefix must be a list of ids, got {prefix!r}")
    tokenizer = HFTokenizer(file, eot_id=meta["eot_id"], prefix=prefix)
    if tokenizer.vocab_size > meta["vocab_size"]:
        raise ValueError(
            f"{file} has {tokenizer.vocab_size} ids, but vocab_size in meta.json is "
            f"{meta['vocab_size']}; they do not belong together"
        )
    return tokenizer


def _check_file(tokens: np.ndarray, vocab_size: int, file: Path) -> str:
    """Checks every id; returns the file's sha256."""
    digest = hashlib.sha256()
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = tokens[start : start + _CHUNK_TOKENS]
        check_ids(chunk, vocab_size, str(file), offset=start)
        digest.update(chunk.data)
    return digest.hexdigest()


def _bytes_per_token(entry: dict[str, Any]) -> float:
    if entry.get("text_bytes") and entry.get("tokens"):
        return entry["text_bytes"] / entry["tokens"]
    return math.nan


def open_folder(path: Path, split: str = "train") -> TokenSource:
    """One split of a corpus folder, memory-mapped.

    A file of up to 1 GiB is read once here: every id against the vocabulary and the content against
    the sha256 in meta.json. Larger files are checked batch by batch as they are read.

    Args:
        path: the folder.
        split: a key of meta.json's `splits`.

    Raises:
        ValueError: see `open_source`; the message names the file and what was expected of it.
    """
    meta = read_meta(path)
    available = ", ".join(sorted(meta["splits"])) or "(none)"
    if split not in meta["splits"]:
        raise DataNotFoundError(f"{path} has no split {split!r}; its meta.json has: {available}")
    entry = meta["splits"][split]
    file = path / entry.get("file", f"{split}.bin")
    if not file.is_file():
        raise DataNotFoundError(f"{path} has no file {file.name} for its split {split!r}")
    dtype = _meta_dtype(meta, path / "meta.json")
    size = file.stat().st_size
    if size == 0:
        raise ValueError(f"{file} is empty")
    if size % dtype.itemsize:
        raise ValueError(
            f"{file} has {size} bytes, not a multiple of the {dtype.itemsize} bytes of one "
            f"{dtype.name} id; it is truncated, or its dtype in meta.json is wrong"
        )
    length = size // dtype.itemsize
    if entry.get("tokens", length) != length:
        raise ValueError(
            f"{file} has {length} tokens, but meta.json says {entry['tokens']}; the file is "
            f"truncated or of another version"
        )
    tokenizer = open_folder_tokenizer(path)
    tokens = np.memmap(file, dtype=dtype, mode="r")
    expected = meta.get("files", {}).get(file.name, {}).get("sha256")
    if size <= FULL_CHECK_BYTES or expected is None:
        digest = _check_file(tokens, meta["vocab_size"], file)
        if expected is not None and digest != expected:
            raise ValueError(
                f"{file} was changed after it was made: its sha256 is {digest}, meta.json says "
                f"{expected}"
            )
    else:
        digest = expected
    name = str(meta.get("name", path.resolve().name))
    return TokenSource(
        name=name,
        split=split,
        tokens=tokens,
        vocab_size=meta["vocab_size"],
        eot_id=meta["eot_id"],
        tokenizer=tokenizer,
        fingerprint=make_fingerprint(name, length, digest),
        bytes_per_token=_bytes_per_token(entry),
    )
