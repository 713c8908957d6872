"""Text to batches: tokenizers, corpora, and the input pipeline."""

from sparsejax.data.pipeline import Loader, make_loader
from sparsejax.data.sources import (
    DataNotFoundError,
    TokenSource,
    array_source,
    check_vocab,
    open_source,
    open_tokenizer,
)
from sparsejax.data.tokenizer import (
    ByteTokenizer,
    HFTokenizer,
    StreamDecoder,
    Tokenizer,
    prompt_ids,
)
from sparsejax.data.windows import Batch, document_arrays

__all__ = [
    "Batch",
    "ByteTokenizer",
    "DataNotFoundError",
    "HFTokenizer",
    "Loader",
    "StreamDecoder",
    "TokenSource",
    "Tokenizer",
    "array_source",
    "check_vocab",
    "document_arrays",
    "make_loader",
    "open_source",
    "open_tokenizer",
    "prompt_ids",
]
