"""Accuracies from scores worked out one by one; rows that cannot be used, by line."""

import dataclasses
import json
import math

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from sparsejax.data import HFTokenizer
from sparsejax.evaluation import Question, multiple_choice, read_questions

QUESTIONS = [
    Question("The answer is", ("yes", "no, never", "it depends"), 1, 1),
    Question("", ("alpha", "b"), 0, 2),
    Question("naïve", ("東京", "x"), 1, 3),
    Question("1 + 1 =", ("2", "three"), 0, 4),
]


def logprob(reference, question, choice, separator=" "):
    before = list(question.context.encode()) or [256]
    after = list(((separator if question.context else "") + choice).encode())
    ids = [*before, *after]
    table = reference(ids[:-1])[-len(after) :]
    return table[np.arange(len(after)), after].sum()


@pytest.mark.parametrize("separator", [" ", ""])
def test_against_scores_one_by_one(model, reference, separator):
    found = multiple_choice(model, QUESTIONS, separator=separator, batch_size=4)
    raw, per_byte = [], []
    for question, scores in zip(QUESTIONS, found.logprobs, strict=True):
        want = [logprob(reference, question, choice, separator) for choice in question.choices]
        np.testing.assert_allclose(scores, want, rtol=2e-5)
        sizes = [len(choice.encode()) for choice in question.choices]
        raw.append(np.argmax(want) == question.answer)
        per_byte.append(np.argmax(np.array(want) / sizes) == question.answer)
    values = found.to_dict()
    assert values["questions"] == 4
    assert values["accuracy"] == np.mean(raw)
    assert values["accuracy_per_byte"] == np.mean(per_byte)
    assert values["chance"] == pytest.approx((1 / 3 + 3 / 2) / 4)
    assert raw != per_byte  # the two are told apart
    share = np.mean(raw)
    assert values["accuracy_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 3))


def test_on_eight_devices(model, model_on_eight):
    one, eight = (multiple_choice(m, QUESTIONS, batch_size=4) for m in (model, model_on_eight))
    for ours, theirs in zip(one.logprobs, eight.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5)
    assert one.to_dict() == eight.to_dict()


def test_long_contexts_are_cut_and_counted(model):
    long = Question("x" * 40, ("a", "b"), 0, 7)
    found = multiple_choice(model, [long, QUESTIONS[1]])
    assert found.cut == found.to_dict()["contexts_cut"] == 1
    assert "1 contexts were cut" in str(found)
    short = Question("x" * 31, ("a", "b"), 0)  # the 31 bytes and the separator are what is seen
    np.testing.assert_allclose(found.logprobs[0], multiple_choice(model, [short]).logprobs[0], 2e-5)
    with pytest.raises(ValueError, match="line 7, choice 1 has 33 tokens"):
        multiple_choice(model, [Question("", ("a", "b" * 33), 0, 7)])
    with pytest.raises(ValueError, match="questions is empty"):
        multiple_choice(model, [])


def test_one_question_has_no_standard_error(model):
    found = multiple_choice(model, QUESTIONS[:1])
    assert found.to_dict()["accuracy_stderr"] is None
    assert "+-" not in str(found)


def write(tmp_path, *lines):
    file = tmp_path / "questions.jsonl"
    rows = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    file.write_bytes(b"\n".join(rows))
    return file


def test_reading(tmp_path):
    file = write(
        tmp_path,
        b"\xef\xbb\xbf" + b'{"question": "q", "choices": ["a", "b"], "answer": 1, "id": 5}',
        b"  ",
        b'{"context": "line\\u2028break", "choices": [" ", "b"], "answer": 0}',
        b"",
    )
    assert read_questions(file) == [
        Question("q", ("a", "b"), 1, 1),
        Question("line\u2028break", (" ", "b"), 0, 3),
    ]
    with pytest.raises(FileNotFoundError):
        read_questions(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="is empty"):
        read_questions(write(tmp_path, b""))


GOOD = {"question": "q", "choices": ["a", "b"], "answer": 0}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"question": ', "line 2: not JSON in UTF-8"),
        (b'{"question": "\xff"}', "line 2: not JSON in UTF-8"),
        ([1], "line 2: expected a JSON object"),
        ({"choices": ["a", "b"], "answer": 0}, "got neither"),
        (GOOD | {"context": "c"}, "expected one of"),
        (GOOD | {"question": 5}, '"question" must be a text, got 5'),
        (GOOD | {"choices": ["a"]}, "two or more texts"),
        (GOOD | {"choices": "ab"}, "two or more texts, got 'ab'"),
        (GOOD | {"choices": ["a", ""]}, "choice 1 must be a text that is not empty, got ''"),
        (GOOD | {"choices": ["a", 1]}, "choice 1 must be a text"),
        (GOOD | {"choices": ["a", "b", "a"]}, "choices 0 and 2 are the same"),
        (GOOD | {"answer": 2}, r"an index in 0\.\.1, got 2"),
        (GOOD | {"answer": -1}, "got -1"),
        (GOOD | {"answer": True}, "got True"),
        (GOOD | {"answer": "a"}, "got 'a'"),
        ({"question": "q", "choices": ["a", "b"]}, "got None"),
        (b'{"question": "\\ud800", "choices": ["a", "b"], "answer": 0}', "surrogate"),
    ],
)
def test_bad_rows(tmp_path, row, message):
    file = write(tmp_path, GOOD, row, GOOD)
    with pytest.raises(ValueError, match=message) as caught:
        read_questions(file)
    assert str(caught.value).count("\n") == 1  # the other lines are good


def test_many_bad_rows(tmp_path):
    with pytest.raises(ValueError, match=r"line 10: .*\n  and 2 more lines$"):
        read_questions(write(tmp_path, *[[]] * 12))


def test_choices_that_the_tokenizer_cannot_tell_apart(model, tmp_path):
    """Their scores are equal, and the first of them would always be the model's answer."""
    words = tokenizers.Tokenizer(models.WordLevel({"is": 0, "yes": 1, "no": 2, "</s>": 3}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.normalizer = normalizers.Lowercase()
    words.add_special_tokens(["</s>"])
    words.save(str(tmp_path / "words.json"))
    lower = dataclasses.replace(model, tokenizer=HFTokenizer(tmp_path / "words.json"))
    with pytest.raises(ValueError, match="line 3, choice 2 and choice 0 are the same ids"):
        multiple_choice(lower, [Question("is", ("yes", "no", "Yes"), 0, 3)])
    # Two questions may well have the same choices.
    same = Question("is", ("yes", "no"), 0)
    assert len(multiple_choice(lower, [same, same]).answers) == 2


def test_rows_that_are_too_deep(tmp_path):
    file = tmp_path / "deep.jsonl"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="line 1: not JSON in UTF-8"):
        read_questions(file)
