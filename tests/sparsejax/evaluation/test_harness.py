"""The adapter against lm-evaluation-harness's own API, with local tasks."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from sparsejax.evaluation import Question, harness_model, multiple_choice, run_harness
from sparsejax.evaluation.harness import as_json

installed = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not installed, reason="lm-evaluation-harness is not installed")
# Its own imports and files warn; ours are checked by every other test.
pytestmark = pytest.mark.filterwarnings("default")

QUESTIONS = [
    {"question": "The answer is", "choices": ["yes", "no, never", "it depends"], "answer": 1},
    {"question": "1 + 1 =", "choices": ["2", "three"], "answer": 0},
    {"question": "naive", "choices": ["ab", "x"], "answer": 1},
]


def test_without_the_harness(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sparsejax\[eval\]'"):
        harness_model(model)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'sparsejax\[eval\]'"):
        run_harness(model, ["any"])


def test_tables_become_json():
    values = {"a": np.float64("nan"), 1: (0.5, float("inf"), None, True), "c": np.str_("x")}
    want = {"a": None, "1": [0.5, None, None, True], "c": "x"}
    assert json.loads(json.dumps(as_json(values), allow_nan=False)) == want
    assert as_json(np.int32(3)) == "3" and as_json(1 + 2j) == "(1+2j)"


@needs_harness
def test_the_three_calls(model, reference):
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM

    lm = harness_model(model, batch_size=4)
    assert isinstance(lm, LM)

    def instances(kind, *arguments):
        return [
            Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)
        ]

    found = lm.loglikelihood(instances("loglikelihood", ("ab", " c"), ("", "abc")))
    table = reference([*b"ab "])
    assert found[0][0] == pytest.approx(table[1, 32] + table[2, ord("c")], rel=2e-5)
    table = reference([256, *b"ab"])
    want = table[0, ord("a")] + table[1, ord("b")] + table[2, ord("c")]
    assert found[1][0] == pytest.approx(want, rel=2e-5)
    assert [type(x) for x in found[0]] == [float, bool]

    text = "abc " * 20
    rolling = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (text,), ("abc",), ("",)))
    assert rolling[1:] == [pytest.approx(want, rel=2e-5), 0]
    ids, total = [256, *text.encode()], 0.0
    for i, target in enumerate(text.encode()):
        start = 48 if i >= 64 else i // 32 * 32
        total += reference(ids[start : i + 1])[-1][target]
    assert rolling[0] == pytest.approx(total, rel=2e-5)

    values = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    (generated,) = lm.generate_until(instances("generate_until", ("def", values)))
    ids = [*b"def"]
    for _ in range(8):
        ids.append(int(reference(ids)[-1][:257].argmax()))
    want = bytes(i for i in ids[3:][: [*ids[3:], 256].index(256)]).decode(errors="replace")
    assert generated == want.split("\n")[0]


@needs_harness
def test_a_local_task(model, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (tmp_path / "local_choice.yaml").write_text(
        f"""task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - metric: acc
  - metric: acc_norm
"""
    )
    (tmp_path / "local_text.yaml").write_text(
        f"""task: local_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: bits_per_byte
"""
    )
    (tmp_path / "local_words.yaml").write_text(
        f"""task: local_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "nothing"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""
    )
    tasks = ["local_choice", "local_text", "local_words"]
    found = run_harness(model, tasks, include_path=tmp_path, batch_size=4)["results"]
    ours = multiple_choice(
        model,
        [Question(q["question"], tuple(q["choices"]), q["answer"]) for q in QUESTIONS],
        batch_size=4,
    ).to_dict()
    choice = found["local_choice"]
    assert choice["acc,none"] == pytest.approx(ours["accuracy"])
    assert choice["acc_norm,none"] == pytest.approx(ours["accuracy_per_byte"])
    assert choice["acc_stderr,none"] == pytest.approx(ours["accuracy_stderr"])
    lm = harness_model(model, batch_size=4)
    texts = [SimpleNamespace(args=(q["question"],)) for q in QUESTIONS]
    size = sum(len(q["question"]) for q in QUESTIONS)
    bits = -sum(lm.loglikelihood_rolling(texts)) / size / np.log(2)
    assert found["local_text"]["bits_per_byte,none"] == pytest.approx(bits)
    assert found["local_words"]["exact_match,none"] == 0
    with pytest.raises(ValueError, match="knows no task 'absent'"):
        run_harness(model, ["absent"], include_path=tmp_path)
