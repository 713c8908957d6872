"""Checks what the main job promises, from the files of the one run under runs/."""

import json
import sys
from pathlib import Path


def main(runs: Path) -> None:
    """Exits with the figures where one of them misses its mark."""
    (run,) = runs.iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[0], rows[-1]
    figures = (
        f"cross-entropy {first['ce']:.3f} -> {last['ce']:.3f} nats per byte, "
        f"active neurons {first['nnz']:.1f} -> {last['nnz']:.1f}"
    )
    missed = []
    if not last["ce"] < 2.4:
        missed.append("cross-entropy below 2.4")
    if not first["nnz"] >= 5 * last["nnz"]:
        missed.append("active neurons down to a fifth")
    missed += [
        f"{name}.png" for name in ("loss", "nnz") if not (run / f"plots/{name}.png").exists()
    ]
    if missed:
        sys.exit(f"{figures}; missed: {', '.join(missed)}")
    print(figures)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
