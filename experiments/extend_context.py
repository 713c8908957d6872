"""Trains a model on longer and longer sequences, in stages: `--help` lists the flags.

    python experiments/extend_context.py --init-from runs/mine --workdir runs/long \
      --stage seq_len=8192,steps=1000 --stage seq_len=16384,steps=200,theta=1e6 \
      --stage seq_len=131072,steps=50,theta=8e6,batch_size=1

Each stage is a run in a folder of its own under --workdir. The same command goes on with an
interrupted stage and skips those that are done.
"""

from __future__ import annotations

import dataclasses

from sparsejax.distill.context import ExtendConfig, extend_context
from sparsejax.training.launch import Launch, part_of, run_script


@dataclasses.dataclass(frozen=True)
class Args(Launch, ExtendConfig):
    """Trains a model on longer and longer sequences, each stage from the one before it."""


def main(args: Args) -> int:
    """Runs and returns the exit status."""
    args.start()
    for summary in extend_context(part_of(args, ExtendConfig)):
        held_out = summary.get("held_out")
        told = "done"
        if held_out:
            told = f"held-out cross-entropy {held_out['ce']:.4f} nats per token"
            told += f" over {held_out['tokens']:,} tokens"
        print(f"{summary['workdir']}: {summary['step']} updates, {told}")
    return 0


if __name__ == "__main__":
    run_script(main, Args)
