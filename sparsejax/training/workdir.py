"""The folder of one run: where its files lie, and a lock against a second run in it.

config.json  metrics.jsonl  summary.json  checkpoints/  plots/  tokenizer/  .lock
"""

import dataclasses
import errno
import fcntl
import json
import os
import socket
from pathlib import Path

import jax


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of a run's files under `root`."""

    root: Path

    @property
    def config(self) -> Path:
        """The run's flags and model config."""
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The run's result."""
        return self.root / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """The folder for `sparsejax.training.checkpoint.Checkpointer`."""
        return self.root / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """What came along with given weights: their special ids, and maybe their tokenizer."""
        return self.root / "tokenizer"

    @property
    def plots(self) -> Path:
        """The folder for pictures."""
        return self.root / "plots"


class WorkdirInUseError(ValueError):
    """Another run works in this folder."""


class WorkdirLock:
    """Holds `<path>/.lock` while one run writes into `path`; a context manager.

    The lock belongs to the open file (`flock`), not to the file's presence: it goes with the
    process, however that ends, and a file left behind by a crash locks nobody out.
    In a run of several processes only process 0 takes it: enter after `jax.distributed.initialize`.

    Example:
        with WorkdirLock(workdir):
            train(...)
    """

    def __init__(self, path: str | os.PathLike):
        """Name the folder; `with` takes the lock.

        Args:
            path: the run's folder, created if it is absent.
        """
        self.path = Path(path)
        self._fd: int | None = None

    @property
    def file(self) -> Path:
        """The lock file."""
        return self.path / ".lock"

    def __enter__(self) -> "WorkdirLock":
        """Take the lock.

        Raises:
            WorkdirInUseError: another run holds it; names its process and host.
        """
        if self._fd is not None:
            raise RuntimeError(f"{self.file} is held by this very object already")
        if jax.process_index() != 0:
            return self
        self.path.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 4096, 0).decode(errors="replace")
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise WorkdirInUseError(
                f"workdir {self.path} is in use by another run ({_describe(holder)}); "
                f"wait for it, stop it, or choose another workdir"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        self._fd = fd
        # A forked worker would hold the lock beyond this process's death.
        os.register_at_fork(after_in_child=self._drop)
        return self

    def _drop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __exit__(self, *exc_info: object) -> None:
        """Release the lock. The file stays: removing it could hit one that a new run just took."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            self._drop()


def _describe(holder: str) -> str:
    try:
        content = json.loads(holder)
        return f"process {content['pid']} on host {content['host']}"
    except (ValueError, KeyError, TypeError):
        return "it has just started"  # between taking the lock and writing its name
