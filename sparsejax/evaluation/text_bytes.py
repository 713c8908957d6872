"""How many bytes of text a stream of token ids stands for."""

from __future__ import annotations

import numpy as np

from sparsejax.data import ByteTokenizer, StreamDecoder, Tokenizer

_CHUNK = 1 << 14


class ByteCounter:
    """Counts the UTF-8 bytes of a corpus as the tokenizer decodes it, document by document.

    End marks count no byte, special tokens inside a document count as they are spelled, and bytes
    that never become a character count as U+FFFD does (with the byte tokenizer: as they are).

    Args:
      tokenizer: what the ids belong to.
      eot_id: the token that ends a document.
      skip_first: leave out the bytes that the first token of each document completes.

    Attributes:
      total: bytes so far.
    """

    def __init__(self, tokenizer: Tokenizer, eot_id: int, *, skip_first: bool = False):
        self._tokenizer, self._eot_id, self._skip_first = tokenizer, eot_id, skip_first
        self._decoder = StreamDecoder(tokenizer)
        self._at_start = True
        self.total = 0

    def add(self, ids: np.ndarray) -> None:
        """Takes the next (n,) ids of the stream."""
        if isinstance(self._tokenizer, ByteTokenizer):
            self._add_bytes(ids)
            return
        ends = np.flatnonzero(ids == self._eot_id)
        for start, end in zip([0, *(ends + 1)], [*ends, len(ids)], strict=True):
            self._add_text(ids[start:end].tolist())
            if end < len(ids):
                self._finish_document()

    def finish(self) -> int:
        """Ends the stream; returns the total."""
        self._finish_document()
        return self.total

    def _add_text(self, ids: list[int]) -> None:
        if ids and self._at_start:
            self._at_start = False
            opening, ids = ids[:1], ids[1:]
            count = _length(self._decoder.push(opening))
            self.total += 0 if self._skip_first else count
        for start in range(0, len(ids), _CHUNK):
            self.total += _length(self._decoder.push(ids[start : start + _CHUNK]))

    def _finish_document(self) -> None:
        self.total += _length(self._decoder.flush())
        self._at_start = True

    def _add_bytes(self, ids: np.ndarray) -> None:
        if not len(ids):
            return
        text = ids != self._eot_id
        if self._skip_first:
            after_end = np.concatenate([[self._at_start], ~text[:-1]])
            text = text & ~after_end
        self.total += int(text.sum())
        self._at_start = bool(ids[-1] == self._eot_id)


def _length(text: str) -> int:
    return len(text.encode("utf-8", errors="surrogatepass"))
