"""Text to token ids and back: bytes, Hugging Face tokenizer files, and streams of ids."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import tokenizers

# Looked for in this order when neither the caller nor meta.json names the token.
EOT_CANDIDATES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline and generation need from a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: every id is in [0, vocab_size)."""
        ...

    @property
    def eot_id(self) -> int:
        """Id of the token that ends a document."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with nothing added at either end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and 256 for the end of a document (which decodes to nothing)."""

    vocab_size = 257
    eot_id = 256
    prefix: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return "ByteTokenizer()"

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the bytes in `ids`, without the end-of-document marks.

        Raises:
            ValueError: an id outside [0, 257).
        """
        for position, i in enumerate(ids):
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"ids[{position}] is {i}; a byte tokenizer has ids 0..{self.vocab_size - 1}"
                )
        return bytes(i for i in ids if i != self.eot_id).decode("utf-8", errors="replace")


class HFTokenizer:
    """A Hugging Face `tokenizer.json`, read by the `tokenizers` package.

    Args:
        path: the `tokenizer.json` file.
        eot_id: id of the token that ends a document; found by name when left out.
        eot_token: the same, by its text.
        parse_special: read special tokens that are spelled out in a text (`<|endoftext|>`) as those
            tokens. Off by default, so that no text can fake a document boundary.
        prefix: ids that a model of this tokenizer has in front of every text (the
            beginning-of-sequence token of many published models); `encode` leaves them out.

    Raises:
        ValueError: no such file, not a tokenizer, or no end-of-text token in it.
    """

    def __init__(
        self,
        path: str | Path,
        eot_id: int | None = None,
        *,
        eot_token: str | None = None,
        parse_special: bool = False,
        prefix: Sequence[int] = (),
    ):
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"no tokenizer file {self.path}; expected a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as error:  # the package raises bare Exception
            raise ValueError(f"{self.path} is no Hugging Face tokenizer: {error}") from error
        # A stored truncation or padding rule would cut or lengthen documents silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not parse_special
        # Files may skip ids, so the count of entries is not enough.
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.eot_id = self._find_eot(vocab, eot_token) if eot_id is None else eot_id
        if not 0 <= self.eot_id < self.vocab_size:
            raise ValueError(
                f"eot_id is {self.eot_id}; {self.path} has ids 0..{self.vocab_size - 1}"
            )
        self.prefix = tuple(prefix)
        if not all(0 <= i < self.vocab_size for i in self.prefix):
            raise ValueError(
                f"prefix is {list(self.prefix)}; {self.path} has ids 0..{self.vocab_size - 1}"
            )

    def __repr__(self) -> str:
        end = f"eot_id={self.eot_id} {self._tokenizer.id_to_token(self.eot_id)!r}"
        begin = f", prefix={list(self.prefix)}" if self.prefix else ""
        return f"HFTokenizer({str(self.path)!r}, {self.vocab_size} ids, {end}{begin})"

    def added_in_front(self) -> tuple[int, ...]:
        """What the file's own template puts before a text, such as <s>; `encode` does not."""
        raw = self._tokenizer
        special = {token.content for token in raw.get_added_tokens_decoder().values()}
        vocab = raw.get_vocab()
        # A tokenizer of words may have no token for a letter, and a text without one says nothing.
        words = ["a"] if "a" in vocab else sorted(vocab.keys() - special, key=lambda w: vocab[w])
        text = next((w for w in words if raw.encode(w, add_special_tokens=False).ids), None)
        if text is None:
            return ()
        plain = raw.encode(text, add_special_tokens=False).ids
        whole = raw.encode(text, add_special_tokens=True).ids
        starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
        return tuple(whole[: starts[0]]) if starts else ()

    def _find_eot(self, vocab: dict[str, int], eot_token: str | None) -> int:
        wanted = EOT_CANDIDATES if eot_token is None else (eot_token,)
        for token in wanted:
            if token in vocab:
                return vocab[token]
        special = sorted(
            token.content
            for token in self._tokenizer.get_added_tokens_decoder().values()
            if token.special
        )
        raise ValueError(
            f"{self.path} has no end-of-text token: looked for {', '.join(wanted)}; its special "
            f"tokens are {', '.join(special) or '(none)'}. Name one with eot_token (--eot-token)"
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with no special token added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text, spread over the tokenizer's own threads."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens spelled out.

        Raises:
            ValueError: an id that the tokenizer does not have.
        """
        for position, i in enumerate(ids):
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"ids[{position}] is {i}; {self.path.name} has ids 0..{self.vocab_size - 1}"
                )
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text to continue: `tokenizer.prefix`, where it has one, then those of `text`.

    An empty text without a prefix is begun as a document is, after an end mark.
    """
    opening = list(getattr(tokenizer, "prefix", ()))
    return [*opening, *tokenizer.encode(text)] or [tokenizer.eot_id]


class StreamDecoder:
    """Decodes ids as they are made; the pieces joined are `tokenizer.decode(all ids)`.

    A character whose bytes are not complete is held back until its last byte comes (or `flush`).
    Each piece is decoded behind the piece before it, because a token's text may depend on whether
    it opens the text (the leading space of SentencePiece).
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the piece before, then what is not fully emitted
        self._context = 0  # how many of them are the piece before
        self._emitted = 0  # characters of decode(self._ids) already returned

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that is now certain."""
        self._ids.extend(int(i) for i in ids)
        text = self._tokenizer.decode(self._ids)
        # An unfinished character decodes to U+FFFD at the very end (several with byte fallback).
        stable = text.rstrip("\ufffd")
        piece = stable[self._emitted :]
        self._emitted = max(self._emitted, len(stable))
        if stable == text and piece:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._emitted = len(self._tokenizer.decode(self._ids))
        return piece

    def flush(self) -> str:
        """Returns what was held back (U+FFFD for bytes that never became a character)."""
        piece = self._tokenizer.decode(self._ids)[self._emitted :]
        self._ids, self._context, self._emitted = [], 0, 0
        return piece
