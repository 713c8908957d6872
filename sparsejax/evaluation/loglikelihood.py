"""log p(continuation | context) for many pairs, in batches of a few fixed lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from sparsejax.data.sources import check_ids
from sparsejax.evaluation.models import EvalModel
from sparsejax.evaluation.programs import token_scores
from sparsejax.evaluation.windows import WindowPlan
from sparsejax.sharding import check_batch
from sparsejax.training.evaluate import process_block, to_device

_SHORTEST = 32


class Pair(NamedTuple):
    """Ids of a context, at least one, and of what is scored after it, at least one."""

    context: Sequence[int]
    continuation: Sequence[int]


@dataclasses.dataclass(frozen=True)
class PairScore:
    """Score of a pair.

    Attributes:
      logprob: sum of log p over the continuation's tokens.
      greedy: whether each of them is the most probable one.
      tokens: how many they are.
      cut: tokens of the context, its first ones, that were left out to fit the model.
    """

    logprob: float
    greedy: bool
    tokens: int
    cut: int


def encode_pair(
    model: EvalModel, context: str, continuation: str, *, as_harness: bool = False
) -> Pair:
    """Ids of the two texts as they stand in their joined text.

    White space at the context's end goes to the continuation, where most tokenizers have it. If the
    two share a token nevertheless, each is encoded by itself. An empty context is `model.prefix`,
    or an end mark.

    Args:
      model: needs a tokenizer.
      context: what comes before.
      continuation: what is scored.
      as_harness: where a token is shared, score what lm-evaluation-harness does, for numbers that
        can be compared: the joined text's ids from the context's own length on.

    Raises:
      ValueError: the continuation has no token.
    """
    tokenizer = model.text_tokenizer()
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    before = tokenizer.encode(kept) if kept else []
    whole = tokenizer.encode(kept + continuation)
    ids = whole[len(before) :]
    if not ids or (whole[: len(before)] != before and not as_harness):
        ids = tokenizer.encode(continuation)
    if not ids:
        raise ValueError(
            f"the continuation {continuation!r} has no token; an empty text has no score to compare"
        )
    return Pair([*model.prefix, *before] or [tokenizer.eot_id], ids)


def rolling_pairs(model: EvalModel, text: str, window: int | None = None) -> list[Pair]:
    """Pairs that together score every token of `text` once.

    Windows follow each other, and the last one reaches back to be full. None for an empty text.
    """
    tokenizer = model.text_tokenizer()
    ids = [model.prefix[-1] if model.prefix else tokenizer.eot_id, *tokenizer.encode(text)]
    if len(ids) == 1:
        return []
    plan = WindowPlan(len(ids) - 1, window or model.config.context_length, full_tail=True)
    return [Pair(ids[w.start : w.first + 1], ids[w.first + 1 : w.stop + 1]) for w in plan]


def score_pairs(
    model: EvalModel, pairs: Sequence[Pair], *, batch_size: int = 8, progress: bool = False
) -> list[PairScore]:
    """log p(continuation | context) of every pair, in their order.

    Longest first, `batch_size` pairs at a time, each padded to a power of two of tokens, so
    that few lengths are compiled. Where a pair is longer than the model's context,
    the first tokens of its context are left out, and `cut` says how many.

    Raises:
      ValueError: a continuation longer than the model's context length, ids outside the model's
        vocabulary, or a batch that does not fit the mesh.
      FloatingPointError: a score is NaN or infinite; names the pair.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    check_batch(model.mesh, batch_size)
    rows = [_fit(model, i, pair) for i, pair in enumerate(pairs)]
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
    program = token_scores(model.config, model.options, model.mesh, model.num_tokens)
    block, blocks = process_block(model.mesh, batch_size)
    scores: dict[int, PairScore] = {}
    hide = None if progress and jax.process_index() == 0 else True  # None: on terminals only
    with tqdm(total=len(rows), unit="text", disable=hide) as bar:
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            length = _padded(len(rows[chosen[0]][0]) - 1, model.config.context_length)
            tokens, targets = np.zeros((2, batch_size, length), np.int32)
            for row, i in enumerate(chosen):
                ids = rows[i][0]
                tokens[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
            mine = np.array_split(np.arange(batch_size), blocks)[block]
            batch = {"tokens": tokens[mine], "targets": targets[mine]}
            found = jax.device_get(program(model.params, to_device(model.mesh, batch)))
            for row, i in enumerate(chosen):
                ids, cut = rows[i]
                count = len(pairs[i].continuation)
                at = slice(len(ids) - 1 - count, len(ids) - 1)
                logprob = float(found["logprob"][row, at].astype(np.float64).sum())
                if not np.isfinite(logprob):
                    raise FloatingPointError(
                        f"the score of text {i} is {logprob}: the parameters hold NaN or infinity, "
                        "or the compute dtype overflows (try float32)"
                    )
                scores[i] = PairScore(logprob, bool(found["greedy"][row, at].all()), count, cut)
            bar.update(len(chosen))
    return [scores[i] for i in range(len(rows))]


def _fit(model: EvalModel, index: int, pair: Pair) -> tuple[np.ndarray, int]:
    """The ids that the model sees, the last one as a target only, and how many were cut."""
    context, continuation = pair
    if not len(context) or not len(continuation):
        raise ValueError(
            f"text {index}: context and continuation need at least one id each, got "
            f"{len(context)} and {len(continuation)}"
        )
    limit = model.config.context_length
    if len(continuation) > limit:
        raise ValueError(
            f"text {index}: what is to be scored has {len(continuation)} tokens, more than the "
            f"model's context length {limit}"
        )
    ids = np.asarray([*context, *continuation])
    check_ids(ids, model.config.vocab_size, f"text {index}")
    cut = max(0, len(ids) - 1 - limit)
    return ids[cut:], cut


def _padded(length: int, limit: int) -> int:
    return min(max(_SHORTEST, 1 << (length - 1).bit_length()), limit)
