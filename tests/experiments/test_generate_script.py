"""The script: a run's folder in, text out while it is made."""

import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import ModelConfig
from sparsejax.data import ByteTokenizer
from sparsejax.generate import generate
from sparsejax.training.checkpoint import Checkpointer

SCRIPT = Path(__file__).parents[2] / "experiments" / "generate.py"
EOT = ByteTokenizer.eot_id


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("generate_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_script"] = module
    spec.loader.exec_module(module)
    return module


def chain(text, vocab_size=272):
    """A model of no layers that continues `text` (without repeated bytes) and then ends."""
    config = ModelConfig(
        vocab_size=vocab_size,
        d_model=vocab_size,
        layers=(),
        context_length=256,
        tie_embeddings=False,
        dtype="float32",
    )
    ids = [*text.encode(), EOT, text.encode()[0]]
    assert len(set(ids)) == len(ids) - 1
    head = np.zeros((vocab_size, vocab_size), np.float32)
    head[ids[:-1], ids[1:]] = 1.0
    # An id that is no token would be the most probable one everywhere.
    head[:, 260:] = 2.0
    return config, {
        "embed": {"embedding": jnp.eye(vocab_size)},
        "final_norm": {"scale": jnp.ones(vocab_size)},
        "lm_head": {"kernel": jnp.asarray(head)},
    }


def make_run(workdir, *models, data="stdlib"):
    """A run's folder with the checkpoints 10, 20, ..."""
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        for i, (config, params) in enumerate(models):
            state = {"params": params, "step": jnp.int32(10 * i + 10)}
            extra = {"config": config.to_dict(), "data": {"name": str(data)}}
            checkpointer.save(10 * i + 10, state, extra)
    return ["--workdir", str(workdir)]


class Recorder(io.StringIO):
    """Standard output that remembers the single writes."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, text):
        self.writes.append(text)
        return super().write(text)


def test_text_comes_as_it_is_made_in_whole_characters(script, tmp_path, monkeypatch, capsys):
    text = "abc€d😀 é"
    run = make_run(tmp_path, chain(text))
    recorder = Recorder()
    monkeypatch.setattr(sys, "stdout", recorder)
    arguments = [*run, "--prompt", "ab", "--max-new-tokens", "40", "--temperature", "0"]
    assert script.main(arguments) == 0
    assert recorder.getvalue() == text + "\n"
    assert not any("\ufffd" in piece for piece in recorder.writes)
    pieces = [piece for piece in recorder.writes if piece]
    assert pieces == ["ab", *text[2:], "\n"]  # one write per character
    made = len(text.encode()) - 2 + 1
    report = rf"\[{made} tokens from the model of step 10; .* then [\d,]+ tokens/s\]\n"
    assert re.fullmatch(report, capsys.readouterr().err)


def test_a_cut_character_is_shown_as_such_at_the_end(script, tmp_path, capsys):
    run = make_run(tmp_path, chain("x€"))
    assert script.main([*run, "--prompt", "x", "--max-new-tokens", "2", "--no-echo"]) == 0
    assert capsys.readouterr().out == "\ufffd\n"


def test_several_prompts_are_printed_apart(script, tmp_path, capsys):
    run = make_run(tmp_path, chain("abcdefé!"))
    arguments = [*run, "--prompt", "def", "--prompt", "", "--prompt", "b", "--temperature", "0"]
    assert script.main([*arguments, "--max-new-tokens", "5"]) == 0
    # One ends by itself, one at its budget, and one inside a character.
    assert capsys.readouterr().out == (
        "--- prompt 1 of 3\ndefé!\n\n--- prompt 2 of 3\nabcde\n\n--- prompt 3 of 3\nbcdef\ufffd\n\n"
    )


def test_the_step_asked_for_is_taken(script, tmp_path, capsys):
    run = make_run(tmp_path, chain("uvw"), chain("abc"))
    half = ["--dtype", "bfloat16"]
    assert script.main([*run, "--step", "10", "--temperature", "0", *half]) == 0
    assert script.main([*run, "--temperature", "0"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "uvw\nabc\n"
    assert "step 10;" in printed.err
    assert "step 20;" in printed.err
    with pytest.raises(FileNotFoundError, match="7"):
        script.main([*run, "--step", "7"])


def test_draws_are_those_of_the_library(script, tmp_path, capsys):
    config = sparsejax.presets.tiny().replace(init_std=0.3)
    config = config.replace(layers=config.layers[:1])
    params = sparsejax.init_params(config, jax.random.key(0))
    run = make_run(tmp_path, (config, params))
    [ids] = generate(
        config,
        params,
        [list(b"def main(")],
        max_new_tokens=12,
        temperature=1.1,
        top_p=0.8,
        top_k=50,
        key=jax.random.key(5),
        eos_id=EOT,
        num_tokens=257,
        mesh=sparsejax.make_mesh(devices=jax.devices()[:1]),
    )
    arguments = [*run, "--prompt", "def main(", "--max-new-tokens", "12", "--temperature", "1.1"]
    arguments += ["--top-p", "0.8", "--top-k", "50", "--seed", "5"]
    expected = ByteTokenizer().decode(list(b"def main(") + ids) + "\n"
    assert script.main(arguments) == 0
    assert capsys.readouterr().out == expected


def test_a_mesh_of_some_devices(script, tmp_path, capsys):
    run = make_run(tmp_path, chain("abcdefé!"))
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "1", "--mesh.tensor", "2"]
    assert script.main([*run, *mesh, "--prompt", "bc", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "bcdefé!\n"
    with pytest.raises(ValueError, match="must multiply to the number of devices, 8"):
        script.main([*run, "--mesh.data", "16"])


def test_the_tokenizer_of_a_corpus_folder(script, tmp_path, capsys):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    meta = {"vocab_size": 257, "eot_id": EOT, "splits": {}, "tokenizer": "bytes"}
    (corpus / "meta.json").write_text(json.dumps(meta))  # its tokens are not needed
    run = make_run(tmp_path / "run", chain("abc"), data=corpus)
    assert script.main([*run, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "abc\n"
    corpus.rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=r"looked for in .*/corpus\); give tokenizer= \(--tokenizer\) a tokenizer"
    ):
        script.main(run)
    assert script.main([*run, "--temperature", "0", "--tokenizer", "bytes"]) == 0
    assert capsys.readouterr().out == "abc\n"


def test_errors_are_one_line_and_make_no_folder(tmp_path):
    command = [sys.executable, str(SCRIPT), "--workdir", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"generate.py: no folder {tmp_path / 'absent'}; expected a run")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "absent").exists()
