"""Rows of a batch: windows over a token array, and which of them belong to which process."""

import mmap
from typing import Any

import grain
import numpy as np

from sparsejax.data.sources import TokenSource, check_ids

Batch = dict[str, np.ndarray]


class Windows:
    """Row i is tokens[i * seq_len : i * seq_len + seq_len + 1] as int32, its ids checked.

    Args:
        source: the corpus.
        seq_len: T; a row has T + 1 ids, the last of them also the first of the next row.
    """

    def __init__(self, source: TokenSource, seq_len: int):
        self._tokens = source.tokens
        self._seq_len = seq_len
        self._vocab_size = source.vocab_size
        self._label = source.label
        self._length = max(0, (len(source.tokens) - 1) // seq_len)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self._seq_len
        window = np.asarray(self._tokens[start : start + self._seq_len + 1])
        check_ids(window, self._vocab_size, self._label, offset=start)
        return window.astype(np.int32)

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memmap carries its whole file; workers map the file themselves instead.
        state = dict(self.__dict__)
        tokens = self._tokens
        if isinstance(tokens, np.memmap) and isinstance(tokens.base, mmap.mmap):
            state["_tokens"] = None
            state["_mapped"] = (tokens.filename, tokens.dtype, tokens.shape, tokens.offset)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        mapped = state.pop("_mapped", None)
        self.__dict__.update(state)
        if mapped is not None:
            file, dtype, shape, offset = mapped
            self._tokens = np.memmap(file, dtype=dtype, mode="r", shape=shape, offset=offset)


class ProcessBlock:
    """Rows of one process: block `index` of `count` equal blocks of every global batch.

    Args:
        rows: the global order.
        batch_size: rows of a global batch.
        index: which process.
        count: how many processes.
        drop_remainder: leave out an incomplete last batch; else rows without tokens complete it.
    """

    def __init__(
        self,
        rows: grain.MapDataset[np.ndarray],
        batch_size: int,
        index: int,
        count: int,
        drop_remainder: bool,
    ):
        self._rows = rows
        self._batch_size = batch_size
        self._local = batch_size // count
        self._offset = index * self._local
        self.num_batches = len(rows) // batch_size
        if not drop_remainder and len(rows) % batch_size:
            self.num_batches += 1

    def __len__(self) -> int:
        return self.num_batches * self._local

    def __getitem__(self, index: int) -> np.ndarray:
        step, row = divmod(int(index), self._local)
        position = step * self._batch_size + self._offset + row
        return self._rows[position] if position < len(self._rows) else np.empty(0, np.int32)


class RowMaker:
    """Window of T + 1 ids to the arrays of one row of a batch; see `make_loader`.

    Args:
        seq_len: T.
        eot_id: the token that ends a document.
        mask_documents: add `segment_ids`, `positions` and `loss_mask`.
        with_padding: add `loss_mask`, because some windows may be empty.
    """

    def __init__(self, seq_len: int, eot_id: int, mask_documents: bool, with_padding: bool):
        self._seq_len = seq_len
        self._eot_id = eot_id
        self._mask_documents = mask_documents
        self._with_padding = with_padding

    def __call__(self, window: np.ndarray) -> Batch:
        """Arrays of (T,) from (T + 1,) ids, or from none for a row of padding."""
        padding = len(window) == 0
        if padding:
            window = np.full(self._seq_len + 1, self._eot_id, dtype=np.int32)
        tokens, targets = window[:-1], window[1:]
        row = {"tokens": tokens, "targets": targets}
        if self._mask_documents:
            row |= document_arrays(tokens, self._eot_id)
        elif self._with_padding:
            row["loss_mask"] = np.ones(self._seq_len, dtype=bool)
        if padding:
            row["loss_mask"] = np.zeros(self._seq_len, dtype=bool)
            if self._mask_documents:
                row["segment_ids"] = np.zeros(self._seq_len, dtype=np.int32)
        return row


def document_arrays(tokens: np.ndarray, eot_id: int) -> Batch:
    """Which document each of (T,) tokens is in, its place there, and whether its target is too.

    The end mark belongs to the document that it ends. A document cut by the window counts from the
    window's first token.

    Args:
        tokens: (T,) ids.
        eot_id: the token that ends a document.

    Returns:
        `segment_ids` (T,) int32, 1 for the first document in the window, 2 for the next;
        `positions` (T,) int32 from 0 in each document; `loss_mask` (T,) bool, False where the
        target is the first token of the next document.
    """
    index = np.arange(len(tokens), dtype=np.int32)
    starts = np.zeros(len(tokens), dtype=bool)
    starts[1:] = tokens[:-1] == eot_id
    return {
        "segment_ids": np.cumsum(starts, dtype=np.int32) + np.int32(1),
        "positions": index - np.maximum.accumulate(np.where(starts, index, np.int32(0))),
        "loss_mask": tokens != eot_id,
    }
