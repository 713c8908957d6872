"""Cross-entropy of a corpus: per token, per byte of text, and by position in the window."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from sparsejax.data import Batch, TokenSource, document_arrays
from sparsejax.data.sources import check_ids
from sparsejax.evaluation.models import EvalModel
from sparsejax.evaluation.programs import position_sums
from sparsejax.evaluation.text_bytes import ByteCounter
from sparsejax.evaluation.windows import WindowPlan
from sparsejax.sharding import check_batch
from sparsejax.training.evaluate import process_block, to_device

# Where a context is longer than this, windows are not, unless they are asked for.
DEFAULT_WINDOW = 2048


@dataclasses.dataclass(frozen=True, eq=False)
class Perplexity:
    """Cross-entropy of a text.

    Attributes:
      corpus: name, length and digest of the corpus.
      tokens: tokens of the text, end marks included.
      scored: how many of them were scored; all, but for documents' first tokens where documents
        are kept apart.
      nats: sum of -log p over the scored tokens.
      text_bytes: bytes of the scored tokens' text, see `ByteCounter`; None without a tokenizer.
      source_text_bytes: bytes of the text before it was tokenised, where all of it was scored and
        the corpus tells; another number than `text_bytes` says that the tokenizer loses text.
      window: most tokens of one window.
      stride: from one window to the next.
      position_nats: (window,) float64, sum of -log p of the tokens scored at each position.
      position_tokens: (window,) int64, how many those are.
      nnz_per_layer: (L,) active neurons per scored token.
    """

    corpus: str
    tokens: int
    scored: int
    nats: float
    text_bytes: int | None
    source_text_bytes: int | None
    window: int
    stride: int
    position_nats: np.ndarray
    position_tokens: np.ndarray
    nnz_per_layer: np.ndarray

    @property
    def nats_per_token(self) -> float:
        """Cross-entropy."""
        return self.nats / self.scored

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """nats / (ln 2 * text_bytes): the end marks' nats count, they have no bytes."""
        return self.nats / (math.log(2) * self.text_bytes) if self.text_bytes else None

    def __str__(self) -> str:
        bits, size = self.bits_per_byte, self.text_bytes
        return (
            f"{self.corpus}\n{self.scored:,} of {self.tokens:,} tokens scored: "
            f"{self.nats_per_token:.4f} nats per token, perplexity {self.perplexity:.3f}, "
            + ("" if bits is None else f"{bits:.4f} bits per byte ({size:,} bytes), ")
            + f"{self.to_dict()['nnz']:.1f} active neurons per layer"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, the curve left out."""
        return {
            "corpus": self.corpus,
            "nats_per_token": self.nats_per_token,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "scored": self.scored,
            "text_bytes": self.text_bytes,
            "source_text_bytes": self.source_text_bytes,
            "window": self.window,
            "stride": self.stride,
            "nnz": float(self.nnz_per_layer.mean()) if self.nnz_per_layer.size else 0.0,
            "nnz_per_layer": self.nnz_per_layer.tolist(),
        }


def perplexity(
    model: EvalModel,
    source: TokenSource,
    *,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    mask_documents: bool = False,
    max_tokens: int | None = None,
    progress: bool = False,
) -> Perplexity:
    """Scores every token of `source` once, in windows read from it batch by batch.

    The first token is scored after an end mark, as every other document's first token is (or after
    `model.prefix`, where there is one).

    Args:
      model: what is evaluated.
      source: the text.
      window: tokens per window; None takes the model's context length, at most 2048.
      stride: from one window to the next, at most `window`; a shorter one gives each token at least
        `window - stride` tokens of context and costs window / stride times as much. None does not
        overlap.
      batch_size: windows at a time, over all devices.
      mask_documents: keep attention and positions inside documents, as training with that flag
        does. Documents' first tokens then have no context and are not scored.
      max_tokens: score no more than the first so many tokens.
      progress: show a progress bar.

    Raises:
      ValueError: arguments that do not fit the model, the text or the mesh, or no token to score.
      FloatingPointError: the loss is NaN or infinite; says in which tokens.
    """
    model.check_source(source)
    context = model.config.context_length
    window = min(context, DEFAULT_WINDOW) if window is None else window
    if window > context:
        raise ValueError(f"window {window} exceeds the model's context length {context}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    check_batch(model.mesh, batch_size)
    num_tokens = min(len(source.tokens), max_tokens or len(source.tokens))
    plan = WindowPlan(num_tokens, window, stride)
    counter = None
    if source.tokenizer is not None:
        counter = ByteCounter(source.tokenizer, source.eot_id, skip_first=mask_documents)
    program = position_sums(model.config, model.options, model.mesh)
    block, blocks = process_block(model.mesh, batch_size)
    total = _Sums(window, len(model.config.ffn_layers))
    pending: tuple[range, Any] | None = None
    hide = None if progress and jax.process_index() == 0 else True  # None: on terminals only
    with tqdm(total=num_tokens, unit="token", unit_scale=True, disable=hide) as bar:
        for begin in range(0, len(plan), batch_size):
            rows = np.array_split(np.arange(begin, begin + batch_size), blocks)[block]
            batch = _batch(model, source, plan, rows, mask_documents)
            sums = program(model.params, to_device(model.mesh, batch))
            last = min(begin + batch_size, len(plan)) - 1
            span = range(plan[begin].first, plan[last].stop)
            if counter:  # while the device works
                counter.add(np.asarray(source.tokens[span.start : span.stop]))
            if pending:  # one batch stays in flight
                total.add(*pending)
            pending = span, sums
            bar.update(len(span))
        assert pending is not None
        total.add(*pending)
    scored = int(total.tokens.sum())
    if not scored:
        raise ValueError(
            f"no token of {source.label} could be scored: with documents kept apart, every one of "
            f"its {num_tokens} tokens is the first of a document"
        )
    known = scored == len(source.tokens) and math.isfinite(source.bytes_per_token)
    return Perplexity(
        corpus=f"{source.label}: {source.fingerprint}",
        tokens=num_tokens,
        scored=scored,
        nats=float(total.nats.sum()),
        text_bytes=counter.finish() if counter else None,
        source_text_bytes=round(source.bytes_per_token * scored) if known else None,
        window=window,
        stride=plan.step,
        position_nats=total.nats,
        position_tokens=total.tokens,
        nnz_per_layer=total.nnz / scored,
    )


class _Sums:
    """Float64 totals of the batches, each checked to be finite."""

    def __init__(self, window: int, layers: int):
        self.nats, self.nnz = np.zeros(window), np.zeros(layers)
        self.tokens = np.zeros(window, np.int64)

    def add(self, span: range, sums: dict[str, jax.Array]) -> None:
        values = jax.device_get(sums)
        if not np.isfinite(values["nats"]).all():
            position = int(np.argmin(np.isfinite(values["nats"])))
            raise FloatingPointError(
                f"the loss is not finite among tokens {span.start} to {span.stop - 1}, at position "
                f"{position} of a window: the parameters hold NaN or infinity, or the compute "
                "dtype overflows (try float32)"
            )
        self.nats += values["nats"]
        self.nnz += values["nnz"]
        self.tokens += values["tokens"]


def _batch(
    model: EvalModel, source: TokenSource, plan: WindowPlan, rows: np.ndarray, documents: bool
) -> Batch:
    """The windows `rows`; those beyond the plan, and places beyond a window, are masked."""
    shape = (len(rows), plan.window)
    tokens, targets = np.full((2, *shape), source.eot_id, np.int32)
    opening = model.prefix[-1] if model.prefix and not documents else source.eot_id
    mask = np.zeros(shape, bool)
    for row, index in enumerate(rows):
        if index >= len(plan):
            break
        start, first, stop = plan[int(index)]
        begin = max(start - 1, 0)
        ids = np.asarray(source.tokens[begin:stop])
        check_ids(ids, source.vocab_size, source.label, offset=begin)
        size = stop - start
        targets[row, :size] = ids[start - begin :]
        tokens[row, 1:size] = targets[row, : size - 1]
        tokens[row, 0] = ids[0] if start else opening
        mask[row, first - start : size] = True
    batch: Batch = {"tokens": tokens, "targets": targets, "loss_mask": mask}
    if documents:
        arrays = document_arrays(tokens, source.eot_id)
        batch |= arrays | {"loss_mask": mask & arrays["loss_mask"]}
    return batch
