"""Text files to a tokenised corpus folder (the format of `sparsejax.data.folder`).

The folder is written beside its final place and renamed at the end, so an interrupted run leaves
nothing that opens as a corpus. The same inputs, tokenizer and seed give the same bytes for every
number of workers.
"""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tqdm import tqdm

from sparsejax.data.documents import Document, find_files, read_documents
from sparsejax.data.encoding import Piece, encode_documents
from sparsejax.data.folder import BYTE_TOKENIZER, token_dtype
from sparsejax.data.splitting import in_validation
from sparsejax.data.tokenizer import ByteTokenizer, HFTokenizer
from sparsejax.data.writing import SplitWriter, check_out, new_folder

# Text that is decoded again, to see whether this tokenizer gives texts back as they were.
_ROUND_TRIP_BYTES = 1 << 20


class _RoundTrip:
    """Counts how many of the first texts decode to themselves."""

    def __init__(self, tokenizer: ByteTokenizer | HFTokenizer):
        self._tokenizer = tokenizer
        self._bytes = 0
        self.checked = 0
        self.exact = 0
        self.first_loss: str | None = None

    def see(self, piece: Piece, ids: np.ndarray) -> None:
        whole = len(piece.text) == len(piece.document.text)
        if not whole or self._bytes >= _ROUND_TRIP_BYTES:
            return
        self._bytes += len(piece.text)
        self.checked += 1
        if self._tokenizer.decode(ids.tolist()) == piece.text:
            self.exact += 1
        elif self.first_loss is None:
            self.first_loss = piece.document.origin


def _not_empty(files: Sequence[Path], text_key: str, bar: tqdm) -> Iterator[Document]:
    for file in files:
        for document in read_documents(file, text_key):
            bar.update(document.input_bytes)
            if document.text:
                yield document


def _write_splits(
    folder: Path,
    pieces: Iterator[tuple[Piece, np.ndarray]],
    eot_id: int,
    dtype: np.dtype,
    val_fraction: float,
    seed: int,
    round_trip: _RoundTrip,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Writes train.bin and val.bin; returns `splits` and `files` of meta.json."""
    with (
        SplitWriter(folder / "train.bin", eot_id, dtype) as train,
        SplitWriter(folder / "val.bin", eot_id, dtype) as val,
    ):
        document, writer = None, train
        for piece, ids in pieces:
            if piece.document is not document:
                document = piece.document
                writer = val if in_validation(document.text.encode(), val_fraction, seed) else train
            round_trip.see(piece, ids)
            writer.write(ids, len(piece.text.encode()), piece.last)
    splits, files = {}, {}
    for name, writer in (("train", train), ("val", val)):
        split, file = writer.describe()
        if writer.documents:
            splits[name], files[split["file"]] = split, file
        else:
            (folder / split["file"]).unlink()
    return splits, files


def _check_splits(splits: dict[str, Any], val_fraction: float, seed: int) -> None:
    if not splits:
        raise ValueError("the inputs hold no text: every document is empty")
    if "train" not in splits:
        raise ValueError(
            f"all {splits['val']['documents']} documents fell into 'val' with val_fraction "
            f"{val_fraction} and seed {seed}; lower val_fraction or take another seed"
        )
    if "val" not in splits and val_fraction > 0:
        warnings.warn(
            f"no split 'val': none of {splits['train']['documents']} documents was held out with "
            f"val_fraction {val_fraction} and seed {seed}; raise val_fraction, take another seed, "
            f"or cut the text into more documents",
            stacklevel=3,
        )


def _warn_of_losses(splits: dict[str, Any], round_trip: _RoundTrip, eot_token: str) -> None:
    if round_trip.exact < round_trip.checked:
        warnings.warn(
            f"the tokenizer does not give back every text: {round_trip.exact} of "
            f"{round_trip.checked} decoded to themselves; the first that did not is "
            f"{round_trip.first_loss}",
            stacklevel=3,
        )
    marks = sum(split["eot_in_text"] for split in splits.values())
    if marks:
        warnings.warn(
            f"the texts themselves contain {eot_token} {marks} times; training takes those places "
            f"for ends of documents",
            stacklevel=3,
        )


def prepare_corpus(
    inputs: Sequence[str | Path],
    tokenizer: str | Path,
    out: str | Path,
    *,
    text_key: str = "text",
    val_fraction: float = 0.01,
    seed: int = 0,
    num_workers: int | None = None,
    eot_token: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Tokenises text files into a folder that `open_source` reads.

    Empty documents are left out. Warns where there is no "val", where the tokenizer does not give a
    sample of the texts back exactly, and where texts contain the end mark.

    Args:
        inputs: txt, jsonl and parquet files, folders of them, or globs.
        tokenizer: a Hugging Face tokenizer.json, a folder that holds one, or "bytes".
        out: folder to make.
        text_key: key (jsonl) or column (parquet) that holds the text.
        val_fraction: share of documents for the split "val", in [0, 1); chosen by a hash of the
            text, so equal texts are in the same split.
        seed: another seed chooses other documents.
        num_workers: threads that tokenise; by default the number of usable cores.
        eot_token: the tokenizer's end-of-text token where it has an unusual name.
        overwrite: replace `out` if it is a folder made by this function.
        progress: show a progress bar.

    Returns:
        What is in `meta.json`.

    Raises:
        ValueError: bad arguments or inputs; see `find_files`, `read_documents`, `HFTokenizer`.
    """
    out = Path(out).absolute()
    if not 0 <= val_fraction < 1:
        raise ValueError(f"val_fraction must be in [0, 1), got {val_fraction}")
    if num_workers is None:
        num_workers = len(os.sched_getaffinity(0))
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    check_out(out, overwrite)
    files = find_files(inputs)
    by_bytes = str(tokenizer) == BYTE_TOKENIZER
    if not by_bytes and Path(tokenizer).is_dir():
        tokenizer = Path(tokenizer) / "tokenizer.json"

    def make_tokenizer() -> ByteTokenizer | HFTokenizer:
        return ByteTokenizer() if by_bytes else HFTokenizer(tokenizer, eot_token=eot_token)

    main = make_tokenizer()
    end_mark = "256" if by_bytes else main.decode([main.eot_id])
    dtype = token_dtype(main.vocab_size)
    round_trip = _RoundTrip(main)
    size = sum(file.stat().st_size for file in files)
    with new_folder(out) as folder:
        with tqdm(total=size, unit="B", unit_scale=True, disable=not progress) as bar:
            documents = _not_empty(files, text_key, bar)
            pieces = encode_documents(documents, make_tokenizer, dtype, num_workers)
            with contextlib.closing(pieces):
                splits, written = _write_splits(
                    folder, pieces, main.eot_id, dtype, val_fraction, seed, round_trip
                )
        _check_splits(splits, val_fraction, seed)
        _warn_of_losses(splits, round_trip, end_mark)
        meta = {
            "name": out.name,
            "dtype": f"{dtype.str} (little-endian {dtype.name})",
            "layout": f"each document's tokens, then one {main.eot_id} ({end_mark})",
            "vocab_size": main.vocab_size,
            "eot_id": main.eot_id,
            "tokenizer": BYTE_TOKENIZER if by_bytes else "tokenizer.json",
            "splits": splits,
            "files": written,
            "made_with": {
                "inputs": len(files),
                "input_bytes": size,
                "text_key": text_key,
                "val_fraction": val_fraction,
                "seed": seed,
                "tokenizers": tokenizers.__version__,
                "round_trip": {"checked": round_trip.checked, "exact": round_trip.exact},
            },
        }
        if not by_bytes:
            shutil.copyfile(tokenizer, folder / "tokenizer.json")
        # Last, so that a folder without it is known to be unfinished.
        (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return meta
