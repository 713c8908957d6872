"""Makes a dense (SiLU) model sparse: ReLU, then training with an L1 term. `--help` lists the flags.

    python experiments/relufy.py --init-from runs/dense --teacher runs/dense --workdir runs/sparse \
      --steps 3000 --threshold 0.05 --l1-coeff 2e-5 --l1-start 500 --l1-ramp 1000

Writes and resumes as experiments/train.py does. --teacher adds distillation from the dense model.
"""

from __future__ import annotations

import dataclasses

from sparsejax.distill.sparsify import RelufyConfig, sparsify
from sparsejax.training.launch import Launch, held_out_line, part_of, run_script


@dataclasses.dataclass(frozen=True)
class Args(Launch, RelufyConfig):
    """Replaces the activation of a dense model by ReLU and trains on with an L1 term."""


def main(args: Args) -> int:
    """Runs and returns the exit status."""
    args.start()
    summary = sparsify(part_of(args, RelufyConfig))
    first, last = summary.get("first"), summary.get("last")
    if first and last:
        print(
            f"{summary['status']} at step {summary['step']}: training cross-entropy "
            f"{first['ce']:.3f} -> {last['ce']:.3f} nats per token, active neurons per token and "
            f"layer {first['nnz']:.1f} -> {last['nnz']:.1f}; written to {summary['workdir']}"
        )
        if told := held_out_line(summary):
            print(told)
    return 0


if __name__ == "__main__":
    run_script(main, Args, resumes=True)
