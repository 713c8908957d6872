"""Times a whole model on one card: dense SiLU, dense ReLU and sparse ReLU, side by side in one run.

    python experiments/bench_model.py --preset 2b --mode train --out rows.jsonl
    python experiments/bench_model.py --preset 2b --mode prefill --profile measured
    python experiments/bench_model.py --mode decode --smoke        # tiny shapes, runs on a CPU too

Weights are random. Activity is set through gate biases, layer by layer, on the batch that is
timed: `--nnz` active neurons in every layer, or the profile of a trained model. What the model
really shows is reported per layer (`nnz_seen`). The variants share one set of parameters (SiLU
leaves the gate biases out), are compiled side by side and take turns in every repetition. A
training step is that of experiments/train.py, with a learning rate that keeps activity in place.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from pallas_kernels import UnsupportedError
from sparsejax import benchmark
from sparsejax.calibrate import measured_profile
from sparsejax.config import ModelConfig
from sparsejax.studies.flags import at_least, check_file, check_gpu, first_layers, with_smoke
from sparsejax.studies.timing import time_variants
from sparsejax.training.config import TrainConfig

SMOKE = {"preset": "tiny", "layers": 1, "batch_size": 2, "seq_len": 32, "nnz": 8.0, "reps": 2}
SMOKE |= {"calls": 2, "decode_steps": 3}  # both batches


@dataclasses.dataclass(frozen=True)
class Flags:
    """Times dense SiLU, dense ReLU and sparse ReLU models.

    Attributes:
      preset: a sparse preset, or a .json file.
      mode: what one call does: "prefill" reads prompts and fills the cache, "train" makes one
        update, "decode" makes --decode-steps tokens per row.
      batch_size: sequences.
      seq_len: tokens per sequence (of the prompt, for decode); None takes 2048, or 1024 for decode.
      profile: "flat" for --nnz in every layer, "measured" for that of a trained model.
      nnz: active neurons per token and layer.
      pattern: whether a layer's neurons fire equally often or by a power law.
      layers: use only the first so many layers.
      remat: as in experiments/train.py.
      accumulate: microbatches per update.
      decode_steps: tokens per row in one call of decode.
      reps: repetitions, in each of which the variants take turns.
      calls: calls per repetition; None takes 2 (train) or 4.
      energy_seconds: how long each variant runs for its energy; 0 measures none.
      seed: weights and tokens.
      out: JSON lines, appended.
      smoke: tiny shapes; without a GPU the kernels are interpreted.
    """

    preset: str = "2b"
    mode: Literal["prefill", "train", "decode"] = "train"
    batch_size: int = 8
    seq_len: int | None = None
    profile: Literal["flat", "measured"] = "flat"
    nnz: float = 30.0
    pattern: Literal["uniform", "powerlaw"] = "uniform"
    layers: int | None = None
    remat: Literal["none", "dots", "full"] = "none"
    accumulate: int = 1
    decode_steps: int = 32
    reps: int = 5
    calls: int | None = None
    energy_seconds: float = 3.0
    seed: int = 0
    out: Path | None = None
    smoke: bool = False


def model_of(flags: Flags) -> ModelConfig:
    """The sparse model: the preset, cut to --layers."""
    model = first_layers(TrainConfig(preset=flags.preset).model(), flags.layers, flags.preset)
    needed = (flags.seq_len or 0) + (flags.decode_steps if flags.mode == "decode" else 0)
    if needed > model.context_length:
        raise ValueError(
            f"--seq-len (and --decode-steps) come to {needed} positions, beyond the context length "
            f"{model.context_length} of {flags.preset!r}"
        )
    if not model.sparse_layers:
        raise ValueError(f"--preset {flags.preset!r} has no ReLU layer to be sparse in")
    return model


def profile_of(flags: Flags, model: ModelConfig) -> list[float]:
    """Active neurons per token wanted in each ReLU layer."""
    ffns = [model.layers[i].ffn for i in model.sparse_layers]
    widths = [ffn.d_ff for ffn in ffns if ffn is not None]
    if flags.profile == "measured":
        return measured_profile(widths)
    return [min(flags.nnz, float(width)) for width in widths]


def bench(flags: Flags) -> list[dict[str, Any]]:
    """One row per variant."""
    at_least(flags, 1, "batch_size", "seq_len", "layers", "accumulate", "decode_steps", "reps")
    at_least(flags, 1, "calls")
    at_least(flags, 0, "nnz", "energy_seconds", "seed")
    if not flags.smoke:
        check_gpu("the sparse engine")
    model = model_of(flags)
    wanted = profile_of(flags, model)
    began = time.perf_counter()
    names = [field.name for field in dataclasses.fields(benchmark.Shape)]
    shape = benchmark.Shape(**{name: getattr(flags, name) for name in names})
    case = benchmark.make_case(flags.mode, model, wanted, shape)
    print(f"parameters made and activity set in {time.perf_counter() - began:.1f} s", flush=True)
    rows = time_variants(
        case,
        reps=flags.reps,
        calls=(2 if flags.mode == "train" else 4) if flags.calls is None else flags.calls,
        energy_seconds=flags.energy_seconds,
        interpret=flags.smoke and jax.default_backend() != "gpu",
    )
    return [{"bench": "model"} | row | {"nnz_asked": wanted} for row in rows]


def about(flags: Flags) -> dict[str, Any]:
    """What every row says of the run."""
    sha = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "git": sha}
    return device | json.loads(json.dumps(dataclasses.asdict(flags), default=str))


def main(args: list[str] | None = None) -> None:
    """Parses flags, runs, prints a table and writes rows."""
    flags = tyro.cli(Flags, args=args)
    if flags.smoke:
        flags = with_smoke(flags, **SMOKE)
    if flags.seq_len is None:
        flags = dataclasses.replace(flags, seq_len=1024 if flags.mode == "decode" else 2048)
    check_file("--out", flags.out)
    rows = [about(flags) | row for row in bench(flags)]
    for row in rows:
        shown = (
            f"{row['variant']:12} {row['ms']:9.2f} ms ({row['ms_min']:.2f} to {row['ms_max']:.2f})"
        )
        shown += f"  {row['tokens_per_s']:,.0f} tokens/s  x{row['ratio_to_dense_silu']:.3f} of SiLU"
        shown += f"  {row['compiled_bytes']['peak'] / 1e9:.2f} GB"
        joules = row["joules_per_token"]
        shown += f"  {row['energy_reason']}" if joules is None else f"  {joules * 1e3:.3f} mJ/token"
        print(shown, f" nnz {np.mean(row['nnz_seen']):.1f}", flush=True)
    if flags.out:
        with flags.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, UnsupportedError) as error:
        raise SystemExit(f"bench_model.py: {error}") from None
