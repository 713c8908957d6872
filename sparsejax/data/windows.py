"""Windows over a token array, and the batches that one process makes of them."""

import mmap
from typing import Any, cast

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


class ProcessBatches:
    """Batch s of one process, from rows [s B, (s + 1) B) of the global order; see `make_loader`.

    Args:
        order: the global order of windows, maybe endless.
        batch_size: B, rows of a global batch.
        process_index: takes this one of `process_count` equal blocks of them.
        process_count: how many processes.
        seq_len: T.
        eot_id: the token that ends a document.
        mask_documents: add `segment_ids`, `positions` and `loss_mask`.
        drop_remainder: leave out an incomplete last batch; False completes it with rows of `eot_id`
            and adds a `loss_mask` to every batch.
    """

    def __init__(
        self,
        order: grain.MapDataset[np.ndarray],
        *,
        batch_size: int,
        process_index: int,
        process_count: int,
        seq_len: int,
        eot_id: int,
        mask_documents: bool,
        drop_remainder: bool,
    ):
        self._order = order
        self._batch_size = batch_size
        self._local = batch_size // process_count
        self._offset = process_index * self._local
        self._seq_len = seq_len
        self._eot_id = eot_id
        self._mask_documents = mask_documents
        self._drop_remainder = drop_remainder

    def __len__(self) -> int:
        full, remainder = divmod(len(self._order), self._batch_size)
        return full + (remainder > 0 and not self._drop_remainder)

    def __getitem__(self, index: int) -> Batch:
        first = int(index) * self._batch_size + self._offset
        count = max(0, min(self._local, len(self._order) - first))
        windows = np.full((self._local, self._seq_len + 1), self._eot_id, dtype=np.int32)
        for row in range(count):
            windows[row] = cast(np.ndarray, self._order[first + row])
        tokens, targets = np.ascontiguousarray(windows[:, :-1]), windows[:, 1:].copy()
        batch = {"tokens": tokens, "targets": targets}
        if self._mask_documents:
            batch |= document_arrays(tokens, self._eot_id)
            batch["segment_ids"][count:] = 0
        elif not self._drop_remainder:
            batch["loss_mask"] = np.ones(tokens.shape, dtype=bool)
        if count < self._local:
            batch["loss_mask"][count:] = False
        return batch


def document_arrays(tokens: np.ndarray, eot_id: int) -> Batch:
    """Which document each token is in, its place there, and whether its target is there too.

    The end mark belongs to the document that it ends. A document cut by the window counts from the
    window's first token.

    Args:
        tokens: (..., T) ids.
        eot_id: the token that ends a document.

    Returns:
        `segment_ids` (..., T) int32, 1 for the first document of a row, 2 for the next;
        `positions` (..., T) int32 from 0 in each document; `loss_mask` (..., T) bool, False where
        the target is the first token of the next document.
    """
    index = np.arange(tokens.shape[-1], dtype=np.int32)
    ends = tokens == eot_id
    starts = np.zeros_like(ends)
    starts[..., 1:] = ends[..., :-1]
    last_start = np.maximum.accumulate(np.where(starts, index, np.int32(0)), axis=-1)
    return {
        "segment_ids": np.cumsum(starts, axis=-1, dtype=np.int32) + np.int32(1),
        "positions": index - last_start,
        "loss_mask": ~ends,
    }
