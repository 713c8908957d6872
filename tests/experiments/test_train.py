"""`experiments/train.py` as its users run it: processes, signals, messages."""

import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.training.metrics import read_rows

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "train.py"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> str:
    layer = LayerConfig(
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
        ffn=FFNConfig(d_ff=32),
    )
    model = ModelConfig(
        vocab_size=272, d_model=16, layers=(layer,), context_length=16, dtype="float32"
    )
    path = tmp_path_factory.mktemp("model") / "model.json"
    path.write_text(model.to_json())
    return str(path)


@pytest.fixture(autouse=True)
def shared_programs(programs, monkeypatch):
    """The processes of these tests run a few programs many times."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(programs))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def start(*flags: str, devices: int = 1) -> subprocess.Popen:
    # Programs are optimised as little as in this process; of two counts the last holds.
    count = f"--xla_force_host_platform_device_count={devices}"
    flags_for_xla = f"{os.environ['XLA_FLAGS']} {count}"
    env = os.environ | {"XLA_FLAGS": flags_for_xla, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *flags],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, out + err


def train(*flags: str, devices: int = 1) -> tuple[int, str]:
    return finish(start(*flags, devices=devices))


def base(model_file, workdir, *more: str) -> list[str]:
    flags = f"--preset {model_file} --workdir {workdir} --batch-size 8 --log-every 1".split()
    return [*flags, *more]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_leaves_cleanly(model_file, tmp_path, name):
    workdir = tmp_path / "run"
    steps = ("--steps", "100000", "--checkpoint-every", "100000")
    process = start(*base(model_file, workdir, *steps))
    deadline = time.monotonic() + 120
    while len(read_rows(workdir / "metrics.jsonl")) < 3:
        assert process.poll() is None and time.monotonic() < deadline, finish(process)
        time.sleep(0.1)
    process.send_signal(getattr(signal, name))
    status, text = finish(process)
    assert status == 0, text
    step = int(re.search(rf"{name}: saved step (\d+)", text)[1])
    assert [row["step"] for row in read_rows(workdir / "metrics.jsonl")] == list(range(1, step + 1))
    more = ("--resume", "--stop-at", str(step + 2))
    status, text = train(*base(model_file, workdir, *steps, *more))
    assert status == 0 and f"after step {step}" in text, text
    assert read_rows(workdir / "metrics.jsonl")[-1]["step"] == step + 2


def launch_two(*flags_of_each: list[str]) -> list[tuple[int, str]]:
    """Starts two processes of two devices each; returns their statuses and outputs."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    processes = [
        start(
            *flags,
            *f"--coordinator-address {address} --num-processes 2 --process-id {i}".split(),
            devices=2,
        )
        for i, flags in enumerate(flags_of_each)
    ]
    return [finish(process) for process in processes]


def test_two_processes_with_different_flags_refuse_to_train(model_file, tmp_path):
    flags = base(model_file, tmp_path / "run", "--steps", "2", "--learning-rate")
    for status, text in launch_two([*flags, "1e-3"], [*flags, "1e-2"]):
        assert status != 0
        assert "process 1 vs process 0: train.optimizer.learning_rate" in text
    assert not (tmp_path / "run").exists()


def test_two_processes_train_save_and_resume_on_another_mesh(model_file, tmp_path):
    def launch(workdir, *more):
        flags = base(model_file, workdir, "--steps", "8", *more)
        for status, text in launch_two(flags, flags):
            assert status == 0, text

    single = tmp_path / "single"
    mesh = ("--mesh.fsdp", "4")
    status, text = train(*base(model_file, single, "--steps", "8", *mesh), devices=4)
    assert status == 0, text
    want = [row["loss"] for row in read_rows(single / "metrics.jsonl")]

    together = tmp_path / "together"
    evaluate = ("--eval-every", "3", "--eval-batches", "1")
    launch(together, "--mesh.data", "2", "--mesh.tensor", "2", "--stop-at", "3", *evaluate)
    # Tensor ranks in different processes: both feed the same rows.
    launch(
        together, "--resume", "--stop-at", "6", "--mesh.data", "1", "--mesh.fsdp", "2",
        "--mesh.tensor", "2", *evaluate,
    )  # fmt: skip
    status, text = train(*base(model_file, together, "--steps", "8", "--resume", *mesh), devices=4)
    assert status == 0, text
    assert [row["step"] for row in read_rows(together / "eval.jsonl")] == [3, 6, 8]
    rows = read_rows(together / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    np.testing.assert_allclose([row["loss"] for row in rows], want, rtol=1e-4)


def test_a_wrong_flag_gives_one_clear_message_and_a_failing_status(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags, message in (
        (["--preset", "3b"], "train.py: unknown preset '3b'"),
        (["--num-processes", "2"], "coordinator"),
    ):
        status, text = train(*flags)
        assert status != 0
        assert message in text
        assert "Traceback" not in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "steps must be at least 1"),
        (["--stepz", "3"], "--steps"),
        (["--implementation", "triton"], "cannot run: it needs a CUDA device"),
    ],
)
def test_a_wrong_value_leaves_nothing_behind(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stop.value.code  # a text is printed, with status 1
    shown = capsys.readouterr()
    assert message in f"{stop.value.code} {shown.out} {shown.err}"
    assert not list(tmp_path.iterdir())
