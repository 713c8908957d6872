"""`experiments/distill.py` and its kin as users run them: what they print, one-line errors."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, init_params, surgery
from sparsejax.convert import save_run
from sparsejax.training.metrics import read_rows

SCRIPTS = Path(__file__).resolve().parents[2] / "experiments"


def run(script: str, *flags: str, cwd: Path | None = None) -> tuple[int, str]:
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(SCRIPTS / script), *flags]
    done = subprocess.run(
        command, env=env, cwd=cwd, text=True, capture_output=True, timeout=200, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A teacher of two layers, and a student without the first attention."""
    root = tmp_path_factory.mktemp("models")
    layer = LayerConfig(
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8), ffn=FFNConfig(d_ff=32)
    )
    config = ModelConfig(
        vocab_size=272, d_model=16, layers=(layer,) * 2, context_length=16, dtype="float32"
    )
    model = config, init_params(config, jax.random.key(0))
    save_run(root / "teacher", *model)
    save_run(root / "student", *surgery.remove_attention(*model, 0))
    (root / "wide.json").write_text(dataclasses.replace(config, d_model=32).to_json())
    return root


@pytest.mark.slow
def test_distilling_prints_what_came_of_it(folders, tmp_path):
    models = ("--teacher", str(folders / "teacher"), "--student", str(folders / "student"))
    flags = ("--workdir", str(tmp_path / "run"), "--steps", "2", "--log-every", "1")
    status, text = run("distill.py", *models, *flags, "--eval-batches", "1")
    assert status == 0, text
    assert "finished at step 2: divergence from the teacher" in text
    # One batch of 8 rows of 16 tokens.
    said = r"held-out: cross-entropy [0-9.]+ nats per token, divergence from the teacher [0-9.]+, "
    assert re.search(said + r"over 128 tokens \(--eval-batches\)\n", text)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["kl"] > 0


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (
            "distill.py",
            ["--teacher", "teacher", "--preset", "wide.json"],
            "distill.py: hidden states can be compared only at equal width",
        ),
    ],
)
def test_mistakes_give_one_clear_message(folders, script, flags, message):
    before = sorted(folders.iterdir())
    status, text = run(script, *flags, cwd=folders)
    assert status != 0
    assert message in " ".join(text.replace("│", " ").split())
    assert "Traceback" not in text
    assert sorted(folders.iterdir()) == before
