"""Trains a student on a teacher: `python experiments/distill.py --help` lists the flags.

    python experiments/distill.py --teacher runs/whole --student runs/cut --workdir runs/recovered

Folders are runs or Hugging Face folders. It writes and resumes as experiments/train.py does.
"""

from __future__ import annotations

import dataclasses

from sparsejax.distill import DistillConfig, distill
from sparsejax.training.launch import Launch, held_out_line, part_of, run_script


@dataclasses.dataclass(frozen=True)
class Args(Launch, DistillConfig):
    """Trains a student on a teacher's logits and hidden states, or block by block (--blocks)."""


def main(args: Args) -> int:
    """Runs and returns the exit status."""
    args.start()
    summary = distill(part_of(args, DistillConfig))
    first, last = summary.get("first"), summary.get("last")
    if first and last:
        name = "error" if args.distill.blocks else "kl"
        what = "error of blocks" if args.distill.blocks else "divergence from the teacher"
        print(
            f"{summary['status']} at step {summary['step']}: {what} {first[name]:.4f} -> "
            f"{last[name]:.4f}; metrics and plots are in {summary['workdir']}"
        )
    if told := held_out_line(summary):
        print(told)
    return 0


if __name__ == "__main__":
    run_script(main, Args, resumes=True)
