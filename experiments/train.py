"""Trains a transformer: `python experiments/train.py --help` lists the flags.

Writes config.json, metrics.jsonl, eval.jsonl, summary.json, checkpoints/ and plots/ to --workdir.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import tyro

from pallas_kernels import UnsupportedError
from sparsejax import distributed, xla_flags
from sparsejax.training.checkpoint import CheckpointError
from sparsejax.training.config import TrainConfig
from sparsejax.training.loop import NonFiniteLossError, train

# What a user can mend: shown as one line, without a traceback.
EXPECTED = (ValueError, OSError, UnsupportedError, CheckpointError, NonFiniteLossError)


@dataclasses.dataclass(frozen=True)
class Args(TrainConfig):
    """Trains a sparse (or dense) transformer and plots loss and activity.

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


def main(args: Args) -> int:
    """Runs and returns the exit status."""
    if args.deterministic:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = xla_flags.gpu_determinism_flags(flags)
    distributed.initialize(
        coordinator_address=args.coordinator_address,
        num_processes=args.num_processes,
        process_id=args.process_id,
        gpus_per_process=args.gpus_per_process,
    )
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    summary = train(TrainConfig(**{name: getattr(args, name) for name in names}))
    first, last = summary.get("first"), summary.get("last")
    if first and last:
        print(
            f"{summary['status']} at step {summary['step']}: training cross-entropy "
            f"{first['ce']:.3f} -> {last['ce']:.3f} nats per token, active neurons per token and "
            f"layer {first['nnz']:.1f} -> {last['nnz']:.1f}"
        )
        print(f"plots and metrics are in {summary['workdir']}; for text from this model:")
        print(f"  python experiments/generate.py --workdir {summary['workdir']} --prompt 'def '")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args)))
    except KeyboardInterrupt:
        sys.exit(f"{Path(__file__).name}: interrupted between checkpoints; --resume goes on")
    except EXPECTED as error:
        sys.exit(f"{Path(__file__).name}: {error}")
