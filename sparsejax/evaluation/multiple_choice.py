"""Multiple-choice questions: which continuation does the model find most probable?

A file has one JSON object per line:

    {"question": "The capital of France is", "choices": ["Paris", "Rome"], "answer": 0}

"context" is another name for "question"; further keys are left alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsejax.evaluation.loglikelihood import encode_pair, score_pairs
from sparsejax.evaluation.models import EvalModel

_SHOWN_PROBLEMS = 10


@dataclasses.dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
      context: the text before the choices.
      choices: two or more different texts.
      answer: index of the right one.
      line: where it stands in its file, from 1.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    line: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class MultipleChoice:
    """Results over N questions.

    Attributes:
      logprobs: per question, log p of each choice.
      sizes: per question, bytes of each choice.
      answers: per question, the index of the right one.
      cut: questions whose context was longer than the model's and lost its beginning.
    """

    logprobs: list[np.ndarray]
    sizes: list[np.ndarray]
    answers: list[int]
    cut: int

    @property
    def correct(self) -> np.ndarray:
        """(N,) bool: the right choice has the largest log p."""
        pairs = zip(self.logprobs, self.answers, strict=True)
        return np.array([int(np.argmax(scores)) == answer for scores, answer in pairs])

    @property
    def correct_per_byte(self) -> np.ndarray:
        """(N,) bool: the right choice has the largest log p per byte of its text."""
        triples = zip(self.logprobs, self.sizes, self.answers, strict=True)
        return np.array([int(np.argmax(s / size)) == answer for s, size, answer in triples])

    def __str__(self) -> str:
        values = self.to_dict()

        def share(name: str) -> str:
            error = values[f"{name}_stderr"]
            return f"{values[name]:.1%}" + ("" if error is None else f" +- {error:.1%}")

        return (
            f"{values['questions']} questions, accuracy {share('accuracy')}, by bytes "
            f"{share('accuracy_per_byte')}, guessing {values['chance']:.1%}"
            + (f"; {self.cut} contexts were cut to fit the model" if self.cut else "")
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: accuracies with their standard errors, and what guessing would give."""
        raw, per_byte = self.correct, self.correct_per_byte
        return {
            "questions": len(self.answers),
            "accuracy": float(raw.mean()),
            "accuracy_stderr": _stderr(raw),
            "accuracy_per_byte": float(per_byte.mean()),
            "accuracy_per_byte_stderr": _stderr(per_byte),
            "chance": float(np.mean([1 / len(scores) for scores in self.logprobs])),
            "contexts_cut": self.cut,
        }


def read_questions(path: str | os.PathLike) -> list[Question]:
    """Questions of a jsonl file; blank lines are skipped.

    Raises:
      FileNotFoundError: no such file.
      ValueError: rows that are not as they should be, each with its line number; or no row.
    """
    file = Path(path)
    questions, problems = [], []
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            questions.append(_question(line, number))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        shown = [*problems[:_SHOWN_PROBLEMS], *([f"and {more} more lines"] if more > 0 else [])]
        raise ValueError(f"{file} has rows that cannot be used:\n  " + "\n  ".join(shown))
    if not questions:
        raise ValueError(f"{file} is empty; expected one JSON object per line")
    return questions


def _question(line: bytes, number: int) -> Question:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON in UTF-8 ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {row!r:.60}")
    named = [key for key in ("context", "question") if key in row]
    if len(named) != 1:
        raise ValueError(f'expected one of "context" and "question", got {named or "neither"}')
    context, choices, answer = row[named[0]], row.get("choices"), row.get("answer")
    if not isinstance(context, str):
        raise ValueError(f'"{named[0]}" must be a text, got {context!r:.60}')
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f'"choices" must be a list of two or more texts, got {choices!r:.60}')
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise ValueError(f"choice {i} must be a text that is not empty, got {choice!r:.60}")
        if choice in choices[:i]:
            raise ValueError(
                f"choices {choices.index(choice)} and {i} are the same: {choice!r:.60}"
            )
    # bool is an int in Python, and true is no index.
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ValueError(f'"answer" must be an index in 0..{len(choices) - 1}, got {answer!r:.60}')
    for text in (context, *choices):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"a text holds half of a surrogate pair ({error})") from None
    return Question(context, tuple(choices), answer, number)


def multiple_choice(
    model: EvalModel,
    questions: Sequence[Question],
    *,
    separator: str = " ",
    batch_size: int = 8,
    progress: bool = False,
) -> MultipleChoice:
    """Scores log p(separator + choice | context) of every choice.

    Args:
      model: what is evaluated; needs a tokenizer.
      questions: at least one.
      separator: stands between context and choice, and is no part of the choice's length. Not used
        where the context is empty.
      batch_size: choices at a time, over all devices.
      progress: show a progress bar.

    Raises:
      ValueError: no question, or a choice that is too long for the model, has no token, or has the
        same ids as another (names the line); a batch that does not fit the mesh.
      FloatingPointError: a score is NaN or infinite.
    """
    if not questions:
        raise ValueError("questions is empty; give at least one")
    pairs = []
    limit = model.config.context_length
    for question in questions:
        own = []
        for i, choice in enumerate(question.choices):
            text = (separator if question.context else "") + choice
            place = f"line {question.line}, choice {i}"
            try:
                pair = encode_pair(model, question.context, text)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            if len(pair.continuation) > limit:
                raise ValueError(
                    f"{place} has {len(pair.continuation)} tokens, more than the model's context "
                    f"length {limit}"
                )
            if pair in own:  # as a tokenizer without capitals makes of "A" and "a"
                raise ValueError(
                    f"{place} and choice {own.index(pair)} are the same ids to the tokenizer, so "
                    "no score can tell them apart"
                )
            own.append(pair)
        pairs += own
    scores = iter(score_pairs(model, pairs, batch_size=batch_size, progress=progress))
    result = MultipleChoice([], [], [q.answer for q in questions], 0)
    cut = 0
    for question in questions:
        mine = [next(scores) for _ in question.choices]
        result.logprobs.append(np.array([score.logprob for score in mine]))
        result.sizes.append(np.array([len(choice.encode()) for choice in question.choices]))
        cut += any(score.cut for score in mine)
    return dataclasses.replace(result, cut=cut)


def _stderr(correct: np.ndarray) -> float | None:
    """Standard error of the mean; unknown for a single question."""
    n = len(correct)
    return float(correct.std(ddof=1)) / math.sqrt(n) if n > 1 else None
