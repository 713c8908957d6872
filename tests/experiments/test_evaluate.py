"""The script on runs and Hugging Face folders: results, curves, and what stops it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, convert, init_params
from sparsejax.data import HFTokenizer, open_source
from sparsejax.data.prepare import prepare_corpus
from sparsejax.evaluation import open_model, perplexity

SCRIPT = Path(__file__).parents[2] / "experiments" / "evaluate.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("evaluate_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["evaluate_script"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model as a run and as a Hugging Face folder; a corpus; questions."""
    root = tmp_path_factory.mktemp("folders")
    layer = LayerConfig(
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8), ffn=FFNConfig(d_ff=32)
    )
    config = ModelConfig(
        vocab_size=272,
        d_model=16,
        layers=(layer,),
        context_length=16,
        init_std=0.3,
        dtype="float32",
    )
    params = init_params(config, jax.random.key(0))
    convert.save_run(root / "run", config, params)
    convert.save(root / "hf", config, params)
    (root / "text").mkdir()
    for i in range(20):
        (root / "text" / f"{i}.txt").write_text(f"document {i}: räksmörgås\n" * 3)
    prepare_corpus([root / "text"], "bytes", root / "corpus", val_fraction=0.3, progress=False)
    (root / "questions.jsonl").write_text(
        '{"question": "a", "choices": ["bc", "d"], "answer": 0}\n' * 3
    )
    return root


def run(script, folders, kind, *flags):
    common = ["--model", str(folders / kind), "--tokenizer", "bytes", "--batch-size", "8"]
    return script.main([*common, *flags])


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_both_kinds_of_folders_on_eight_devices(script, folders, kind, tmp_path, capsys):
    out = tmp_path / "new" / "result.json"
    flags = ["--data", str(folders / "corpus"), "--tasks", str(folders / "questions.jsonl")]
    mesh = ["--mesh.fsdp", "2", "--mesh.tensor", "2"]
    assert run(script, folders, kind, *flags, *mesh, "--stride", "5", "--out", str(out)) == 0
    source = open_source(folders / "corpus", "val")
    want = perplexity(open_model(folders / "run"), source, stride=5)
    values = json.loads(out.read_text())
    assert values["status"] == "finished"
    assert values["device"] == "8 x cpu"
    found = values["perplexity"]
    assert found["nats_per_token"] == pytest.approx(want.nats_per_token, rel=2e-5)
    text = json.loads((folders / "corpus" / "meta.json").read_text())["splits"]["val"]
    assert found["tokens"] == found["scored"] == text["tokens"]
    assert found["text_bytes"] == found["source_text_bytes"] == text["text_bytes"]
    bits = want.nats / np.log(2) / text["text_bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits, rel=2e-5)
    questions = values["multiple_choice"][str(folders / "questions.jsonl")]
    assert questions["questions"] == 3 and questions["accuracy"] in (0, 1)
    assert {p.name for p in out.parent.iterdir()} == {
        "result.json", "result_by_position.csv", "result_by_position.png"
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert f"{text['tokens']:,} of {text['tokens']:,} tokens scored" in printed
    assert "3 questions, accuracy" in printed


def test_what_was_done_before_an_interruption_is_kept(script, folders, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(script.evaluation, "multiple_choice", interrupted)
    out = tmp_path / "result.json"
    flags = ["--data", str(folders / "corpus"), "--tasks", str(folders / "questions.jsonl")]
    with pytest.raises(KeyboardInterrupt):
        run(script, folders, "run", *flags, "--out", str(out), "--mesh.data", "1")
    values = json.loads(out.read_text())
    assert (values["status"], values["reason"]) == ("unfinished", "KeyboardInterrupt")
    assert values["perplexity"]["scored"] > 0 and "multiple_choice" not in values


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing to evaluate"),
        (["--tasks", "q.jsonl", "--stride", "4"], "--stride has no meaning without --data"),
        (["--data", "stdlib", "--separator", ""], "--separator has no meaning without --tasks"),
        (["--data", "stdlib", "--limit", "4"], "--limit has no meaning without --harness"),
        (["--data", "stdlib", "--bos", "--no-bos"], "--bos and --no-bos exclude each other"),
        (["--data", "absent"], "no corpus 'absent'"),
        (["--data", "stdlib", "--out", "result.txt"], r"--out must end in \.json, got result\.txt"),
        (["--data", "stdlib", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--data", "stdlib", "--batch-size", "3"], "batch size 3 must be a multiple"),
        (["--data", "stdlib", "--window", "17"], "exceeds the model's context length 16"),
        (["--data", "stdlib", "--mesh.tensor", "16"], "must multiply to the number of devices"),
    ],
)
def test_flags_that_do_not_fit(script, folders, flags, message):
    with pytest.raises(ValueError, match=message):
        run(script, folders, "run", *flags)


def test_errors_are_one_line(folders, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "a", "choices": ["b", "c"], "answer": 0}\n{"question": 1}\n')
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", folders / "run", "--tasks", bad],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == (
        f'evaluate.py: {bad} has rows that cannot be used:\n  line 2: "question" must be a text, '
        "got 1\n"
    )


def test_a_refused_corpus_leaves_no_result(script, folders, tmp_path):
    """Bytes for a model of words: the way out is named, and no file is begun."""
    vocab = {f"w{i}": i for i in range(271)} | {"</s>": 271}
    made = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    made.save(str(tmp_path / "tokenizer.json"))
    words = HFTokenizer(tmp_path / "tokenizer.json")
    model = open_model(folders / "run")
    convert.save(tmp_path / "hf", model.config, model.params, words)
    out = tmp_path / "result.json"
    with pytest.raises(ValueError, match="corpus stdlib/val was tokenised with another") as caught:
        script.main(["--model", str(tmp_path / "hf"), "--data", "stdlib", "--out", str(out)])
    assert str(caught.value).endswith(
        f"prepare the text with the model's own: python experiments/prepare_data.py --inputs TEXT "
        f"--tokenizer {tmp_path}/hf/tokenizer.json --out FOLDER"
    )
    assert not out.exists()


def test_what_ended_an_evaluation_is_in_its_result(script, folders, tmp_path):
    out = tmp_path / "result.json"
    with pytest.raises(ValueError, match="exceeds the model's context length 16"):
        run(script, folders, "run", "--data", "stdlib", "--window", "17", "--out", str(out))
    values = json.loads(out.read_text())
    assert values["status"] == "unfinished"
    assert values["reason"] == "window 17 exceeds the model's context length 16"
