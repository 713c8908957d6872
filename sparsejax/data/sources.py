"""Where tokens come from: one flat array of ids with what is needed to read and report on it."""

import dataclasses
import hashlib
import math
from pathlib import Path

import numpy as np

from sparsejax.data.tokenizer import ByteTokenizer, Tokenizer

KNOWN_CORPORA = ("stdlib",)


class DataNotFoundError(FileNotFoundError, ValueError):
    """A corpus, or a part of it, that is not there."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSource:
    """One split of a corpus: documents end to end, each ended by `eot_id`.

    Attributes:
        name: the corpus, for messages and logs.
        split: "train", "val" or another split of a folder.
        tokens: (N,) unsigned ids, in memory or memory-mapped; read-only.
        vocab_size: every id is below it.
        eot_id: the token that ends a document and belongs to it.
        tokenizer: turns ids into text and back; None for arrays that stand for no text.
        fingerprint: the same string if and only if name, length and content are the same.
        bytes_per_token: bytes of text per token, the end marks counted as tokens of no bytes, so
            that bits per byte = nats per token / (ln 2 * bytes_per_token); nan where unknown.
    """

    name: str
    split: str
    tokens: np.ndarray
    vocab_size: int
    eot_id: int
    tokenizer: Tokenizer | None
    fingerprint: str
    bytes_per_token: float

    @property
    def label(self) -> str:
        """`name/split`, as messages call it."""
        return f"{self.name}/{self.split}"

    def bits_per_byte(self, nats_per_token: float) -> float:
        """nats_per_token / (ln 2 * bytes_per_token), comparable between tokenizers."""
        return nats_per_token / (math.log(2) * self.bytes_per_token)


def make_fingerprint(name: str, length: int, sha256: str) -> str:
    """Identity of a token array, readable in a message: `stdlib, 1150 tokens, sha256 8767...`."""
    return f"{name}, {length} tokens, sha256 {sha256[:32]}"


def array_source(
    tokens: np.ndarray,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    eot_id: int | None = None,
    name: str = "array",
    split: str = "train",
    bytes_per_token: float = math.nan,
) -> TokenSource:
    """Wraps a (N,) integer array of ids as a source.

    Args:
        tokens: ids; not copied where it is uint16 or uint32.
        tokenizer: gives `vocab_size` and `eot_id` where they are left out.
        vocab_size: every id must be below it.
        eot_id: the token that ends a document.
        name: the corpus, for messages and the fingerprint.
        split: which part of it.
        bytes_per_token: see `TokenSource`.

    Raises:
        ValueError: not a flat array of integers, no vocabulary given, or an id outside of it.
    """
    if tokenizer is not None:
        vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        eot_id = tokenizer.eot_id if eot_id is None else eot_id
    if vocab_size is None or eot_id is None:
        raise ValueError("give array_source a tokenizer, or both vocab_size and eot_id")
    tokens = np.asanyarray(tokens)  # a memmap stays one
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"tokens must be a flat array of integers, got {tokens.dtype}{list(tokens.shape)}"
        )
    check_ids(tokens, vocab_size, f"{name}/{split}")
    if tokens.dtype not in (np.uint16, np.uint32):
        tokens = tokens.astype(np.uint32)
    digest = hashlib.sha256(np.ascontiguousarray(tokens).data).hexdigest()
    return TokenSource(
        name=name,
        split=split,
        tokens=tokens,
        vocab_size=vocab_size,
        eot_id=eot_id,
        tokenizer=tokenizer,
        fingerprint=make_fingerprint(name, len(tokens), digest),
        bytes_per_token=bytes_per_token,
    )


def check_ids(ids: np.ndarray, vocab_size: int, label: str, offset: int = 0) -> None:
    """Raises a ValueError naming the first id outside [0, vocab_size) and where it stands.

    Args:
        ids: (N,) integers.
        vocab_size: number of valid ids.
        label: the corpus, for the message.
        offset: position of `ids[0]` in the corpus.
    """
    if ids.size == 0 or (int(ids.max()) < vocab_size and int(ids.min()) >= 0):
        return
    position = int(np.argmax((ids >= vocab_size) | (ids < 0)))
    raise ValueError(
        f"{label}: token {offset + position} has id {int(ids[position])}, outside the vocabulary "
        f"of {vocab_size} ids; the tokens and the tokenizer do not belong together, or the file is "
        f"damaged"
    )


def check_vocab(source: TokenSource, model_vocab_size: int) -> None:
    """Raises a ValueError when the model has fewer ids than the source may hold.

    Args:
        source: the corpus.
        model_vocab_size: rows of the model's embedding.
    """
    if model_vocab_size < source.vocab_size:
        raise ValueError(
            f"the model's vocab_size is {model_vocab_size}, but corpus {source.label} has ids up "
            f"to {source.vocab_size - 1}; set the model's vocab_size to {source.vocab_size} or more"
        )


def open_source(name_or_path: str | Path, split: str = "train") -> TokenSource:
    """Opens one split of a corpus.

    Args:
        name_or_path: "stdlib", or a folder with `meta.json`, `{split}.bin` and `tokenizer.json` as
            `experiments/prepare_data.py` writes it.
        split: "train", "val", or another split that the folder's `meta.json` describes.

    Raises:
        ValueError: the corpus, the split or a file of it is missing, empty or damaged (where
            something is missing it is also a FileNotFoundError).
    """
    from sparsejax.data import folder, stdlib  # they build a TokenSource

    if str(name_or_path) == "stdlib":
        return stdlib.open_stdlib(split)
    return folder.open_folder(_existing(name_or_path), split)


def open_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer of a corpus, without reading its tokens.

    Args:
        name_or_path: as for `open_source`.

    Raises:
        ValueError: the corpus or its tokenizer is missing or damaged.
    """
    from sparsejax.data import folder  # it builds a TokenSource

    if str(name_or_path) == "stdlib":
        return ByteTokenizer()
    return folder.open_folder_tokenizer(_existing(name_or_path))


def _existing(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if not path.exists():
        raise DataNotFoundError(
            f"no corpus {str(name_or_path)!r}: expected one of {', '.join(KNOWN_CORPORA)}, or a "
            f"folder made by experiments/prepare_data.py (no such folder: {path.absolute()})"
        )
    return path
