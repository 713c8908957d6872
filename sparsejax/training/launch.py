"""What scripts that train share: flags of a launch, the processes' start, one-line errors."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

from pallas_kernels import UnsupportedError
from sparsejax import distributed, xla_flags
from sparsejax.training.checkpoint import CheckpointError
from sparsejax.training.loop import NonFiniteLossError
from sparsejax.training.stages import StageStoppedError

T = TypeVar("T")

# What a user can mend: shown as one line, without a traceback.
EXPECTED = (
    ValueError,
    OSError,
    UnsupportedError,
    CheckpointError,
    NonFiniteLossError,
    StageStoppedError,
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process's place in a launch.

    Attributes:
      coordinator_address: host:port of process 0, for several processes without a launcher.
      num_processes: processes in the launch; launchers (Slurm, mpirun, torchrun) tell it.
      process_id: this process, from 0.
      gpus_per_process: GPUs each process drives, where the default is not what is wanted.
      deterministic: make a restarted GPU run repeat its bits (slower matmuls); the CPU always does.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    gpus_per_process: int | None = None
    deterministic: bool = False

    def start(self) -> None:
        """Before anything else of jax: flags for XLA, and the other processes."""
        if self.deterministic:
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = xla_flags.gpu_determinism_flags(flags)
        distributed.initialize(
            coordinator_address=self.coordinator_address,
            num_processes=self.num_processes,
            process_id=self.process_id,
            gpus_per_process=self.gpus_per_process,
        )


def part_of(args: Any, kind: type[T]) -> T:
    """The fields of `args` that the dataclass `kind` has, as one."""
    names = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    return kind(**{name: getattr(args, name) for name in names})


def held_out_line(summary: dict[str, Any]) -> str | None:
    """What a finished run's summary says of held-out text, with how much that was; or None."""
    found = summary.get("held_out")
    if not found:
        return None
    kl = f", divergence from the teacher {found['kl']:.4f}" if "kl" in found else ""
    return (
        f"held-out: cross-entropy {found['ce']:.4f} nats per token{kl}, over {found['tokens']:,} "
        "tokens (--eval-batches)"
    )


def run_script(main: Callable[[Any], int], args: type, *, resumes: bool = False) -> NoReturn:
    """`main` on the command line's flags; what a user can mend is told in one line.

    Args:
      main: returns the exit status.
      args: the dataclass of flags.
      resumes: the script has a flag --resume; the others go on by themselves.
    """
    script = Path(sys.argv[0]).name
    try:
        sys.exit(main(tyro.cli(args)))
    except KeyboardInterrupt:
        how = ""
        if resumes:
            how = " with --resume, or without where no checkpoint was made yet,"
        sys.exit(f"{script}: interrupted; what was saved is kept. The same command{how} goes on")
    except EXPECTED as error:
        sys.exit(f"{script}: {error}")
