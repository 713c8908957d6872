"""Makes a trained model shallower: analyses, cuts, fuses, recovers, measures. `--help` lists flags.

    python experiments/shrink.py --workdir runs/mine --out runs/shrunk --latency-target 0.67

Stages lie in folders under --out; the same command goes on where it was left. The result is the run
in 4_recover, which experiments/generate.py and experiments/convert.py take.
"""

from __future__ import annotations

import dataclasses

from sparsejax.shrink import ShrinkConfig, shrink, table
from sparsejax.training.launch import part_of, run_script


@dataclasses.dataclass(frozen=True)
class Args(ShrinkConfig):
    """Makes a trained model shallower and reports what that cost and gained."""


def main(args: Args) -> int:
    """Runs and returns the exit status."""
    report = shrink(part_of(args, ShrinkConfig))
    print(table(report))
    assert args.out is not None  # or `shrink` would have refused
    model = args.out / "4_recover"
    if model.is_dir():
        print(f"the model: {model}; experiments/generate.py --workdir {model} writes with it")
    return 0


if __name__ == "__main__":
    run_script(main, Args)
