"""The lock on a run's folder: one run at a time, and no trace of a dead one stands in the way."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from sparsejax.training.workdir import Workdir, WorkdirInUseError, WorkdirLock

HOLD = """
import sys
from sparsejax.training.workdir import WorkdirLock
with WorkdirLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_until_the_first_dies(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
    )
    with holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            for _ in range(2):  # a refused attempt must not disturb the lock or its name
                with pytest.raises(ValueError, match="in use by another run") as caught:
                    WorkdirLock(tmp_path).__enter__()
                message = str(caught.value)
                assert isinstance(caught.value, WorkdirInUseError)
                assert f"process {holder.pid} on host {socket.gethostname()}" in message
                assert str(tmp_path) in message
                assert "choose another workdir" in message
        finally:
            holder.send_signal(signal.SIGKILL)
    assert str(holder.pid) in (tmp_path / ".lock").read_text()  # the dead run's name stays
    with WorkdirLock(tmp_path) as lock:
        assert str(os.getpid()) in lock.file.read_text()


def test_creates_the_folder_and_is_reusable(tmp_path):
    lock = WorkdirLock(tmp_path / "new" / "run")
    for _ in range(2):
        with lock:
            assert lock.file == tmp_path / "new" / "run" / ".lock"
            with pytest.raises(WorkdirInUseError, match=f"process {os.getpid()} "):
                WorkdirLock(lock.path).__enter__()
            with pytest.raises(RuntimeError, match="held by this very object"):
                lock.__enter__()
        assert lock.file.read_text() == ""


def test_released_on_an_error(tmp_path):
    with pytest.raises(KeyError), WorkdirLock(tmp_path):
        raise KeyError("x")
    with WorkdirLock(tmp_path):
        pass


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_forked_worker_does_not_keep_it(tmp_path):
    ours, workers = socket.socketpair()
    lock = WorkdirLock(tmp_path)
    lock.__enter__()
    pid = os.fork()
    if pid == 0:  # a data worker that outlives the run
        workers.send(b"up")
        workers.recv(1)
        os._exit(0)
    try:
        assert ours.recv(2) == b"up"
        os.close(lock._fd)  # what the kernel does when this process is killed
        lock._fd = None
        with WorkdirLock(tmp_path):
            pass
    finally:
        ours.send(b"x")
        os.waitpid(pid, 0)
        ours.close()
        workers.close()


def test_unreadable_name_is_still_a_clear_refusal(tmp_path):
    with WorkdirLock(tmp_path) as lock:
        lock.file.write_text("")
        with pytest.raises(WorkdirInUseError, match="it has just started"):
            WorkdirLock(tmp_path).__enter__()


def test_a_read_only_place_is_not_called_in_use(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file") as caught:
        WorkdirLock(tmp_path / "file").__enter__()
    assert not isinstance(caught.value, WorkdirInUseError)


def test_paths(tmp_path):
    workdir = Workdir(tmp_path)
    assert [p.name for p in (workdir.config, workdir.metrics, workdir.summary)] == [
        "config.json",
        "metrics.jsonl",
        "summary.json",
    ]
    assert workdir.checkpoints == tmp_path / "checkpoints"
    assert workdir.plots == tmp_path / "plots"
