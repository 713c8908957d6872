"""Trains a transformer: `python experiments/train.py --help` lists the flags.

Writes config.json, metrics.jsonl, eval.jsonl, summary.json, checkpoints/ and plots/ to --workdir.
"""

from __future__ import annotations

import dataclasses

from sparsejax.training.config import TrainConfig
from sparsejax.training.launch import Launch, held_out_line, part_of, run_script
from sparsejax.training.loop import train


@dataclasses.dataclass(frozen=True)
class Args(Launch, TrainConfig):
    """Trains a sparse (or dense) transformer and plots loss and activity."""


def main(args: Args) -> int:
    """Runs and returns the exit status."""
    args.start()
    summary = train(part_of(args, TrainConfig))
    first, last = summary.get("first"), summary.get("last")
    if first and last:
        print(
            f"{summary['status']} at step {summary['step']}: training cross-entropy "
            f"{first['ce']:.3f} -> {last['ce']:.3f} nats per token, active neurons per token and "
            f"layer {first['nnz']:.1f} -> {last['nnz']:.1f}"
        )
        if told := held_out_line(summary):
            print(told)
        print(f"plots and metrics are in {summary['workdir']}; for text from this model:")
        print(f"  python experiments/generate.py --workdir {summary['workdir']} --prompt 'def '")
    return 0


if __name__ == "__main__":
    run_script(main, Args, resumes=True)
