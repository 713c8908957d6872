"""Times a run of feed-forward layers one after the other, and fused into one wide layer.

    python experiments/bench_fusion.py --out rows.jsonl                  # 8 layers, one GPU
    python experiments/bench_fusion.py --tensor 2 --out rows.jsonl       # neurons over two GPUs
    python experiments/bench_fusion.py --smoke --tensor 2                # tiny, host devices

The model's own layers, without attention, run on one token per row; weights are random. Passes are
chained inside one program, so that the host's calls do not count, and both forms take turns in
every repetition. `all_reduces` is how many one pass of the compiled program runs;
`parallel_error` the largest difference of the fused form from the same layers side by side, over
the largest change that they make.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro

from pallas_kernels import UnsupportedError
from sparsejax import surgery
from sparsejax.analysis.collectives import collectives
from sparsejax.config import FFNConfig, LayerConfig, ModelConfig
from sparsejax.modules import Layer, Options
from sparsejax.params import init_params, param_shapes
from sparsejax.sharding import MeshConfig, constrain, make_mesh, tree_shardings
from sparsejax.studies.flags import at_least, check_devices, check_file, with_smoke
from sparsejax.studies.timing import in_turns
from sparsejax.types import Params

SMOKE: dict[str, Any] = {"d_model": 64, "d_ff": 128, "layers": 3, "batches": (1, 2), "steps": 2}
SMOKE |= {"reps": 2}


@dataclasses.dataclass(frozen=True)
class Flags:
    """Times a run of feed-forward layers, sequential and fused.

    Attributes:
      layers: of the run.
      d_model: width.
      d_ff: neurons of each layer.
      activation: of the gated layers.
      implementation: engine of the feed-forward op; None to choose.
      norm: rule of fusing, see `surgery.fuse_ffns`.
      batches: rows, one token each.
      tensor: devices that the neurons are divided over.
      steps: passes through the run in one call of the program.
      reps: repetitions, in each of which both forms are called once.
      out: JSON lines, appended.
      smoke: tiny shapes.
    """

    layers: int = 8
    d_model: int = 4096
    d_ff: int = 14336
    activation: Literal["silu", "relu"] = "silu"
    implementation: Literal["triton", "xla"] | None = None
    norm: Literal["last", "fold"] = "last"
    batches: tuple[int, ...] = (1, 8, 32)
    tensor: int = 1
    steps: int = 20
    reps: int = 9
    out: Path | None = None
    smoke: bool = False


def run_of_layers(flags: Flags) -> ModelConfig:
    """The run as a model; nothing beside its layers is used."""
    ffn = FFNConfig(d_ff=flags.d_ff, activation=flags.activation)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return ModelConfig(
        vocab_size=128,
        d_model=flags.d_model,
        layers=(LayerConfig(attention=None, ffn=ffn),) * flags.layers,
        dtype=dtype,
        param_dtype=dtype,
    )


def passes(config: ModelConfig, options: Options, steps: int, params: Params, x: jax.Array):
    """The residual stream (B, 1, D) after `steps` passes through the layers."""
    positions = jnp.zeros(x.shape[:2], jnp.int32)

    def one_pass(_, x):
        base = x
        for i, layer in enumerate(config.layers):
            base = base if layer.parallel_with_previous else x
            module: Any = Layer(config, layer, options)
            own = {"params": params[f"layer_{i}"]}
            x = constrain(x + module.apply(own, base, positions, None, None)[0], None, None, None)
        return x

    return jax.lax.fori_loop(0, steps, one_pass, x)


def bench(flags: Flags) -> list[dict[str, Any]]:
    """Two rows per batch size."""
    at_least(flags, 1, "d_model", "d_ff", "batches", "tensor", "steps", "reps")
    if flags.layers < 2:
        raise ValueError(f"--layers: a run has at least two layers, got {flags.layers}")
    check_devices(f"--tensor {flags.tensor}", flags.tensor)
    config, options = run_of_layers(flags), Options(implementation=flags.implementation)
    mesh = make_mesh(MeshConfig(1, 1, flags.tensor), jax.devices()[: flags.tensor])
    rows = []
    with jax.set_mesh(mesh):
        where = tree_shardings(mesh, param_shapes(config))
        params = init_params(config, jax.random.key(0), where)
        groups = [range(flags.layers)]
        models = {
            "sequential": (config, params),
            "fused": surgery.fuse_ffns(config, params, groups, norm=flags.norm),
        }
        beside = surgery.parallelize_blocks(config, params, groups)
        program = jax.jit(passes, static_argnums=(0, 1, 2))
        for batch in flags.batches:
            shape = (batch, 1, flags.d_model)
            x = jax.random.normal(jax.random.key(1), shape).astype(config.dtype)
            programs, reduces = {}, {}
            for name, (model, weights) in models.items():
                lowered = program.lower(model, options, flags.steps, weights, x)
                programs[name] = lowered.compile()
                found = collectives(programs[name].as_text())
                times_run = sum(c.runs for c in found if c.kind == "all-reduce")
                reduces[name] = times_run / flags.steps
            small = x / 128  # norms see the same, and x + change - x loses less of the change
            fused, side = (
                program(model, options, 1, w, small).astype(jnp.float32) - small.astype(jnp.float32)
                for model, w in (models["fused"], beside)
            )
            error = float(jnp.max(jnp.abs(fused - side)) / jnp.max(jnp.abs(side)))

            def runner(name: str, programs=programs, x=x):
                weights = models[name][1]
                return lambda: jax.block_until_ready(programs[name](weights, x))

            times = in_turns({name: runner(name) for name in models}, flags.reps, flags.steps)
            for name, took in times.items():
                rows.append(
                    {"bench": "fusion", "form": name, "batch": batch, "ms": took.ms}
                    | {"ms_min": took.least, "ms_max": took.most}
                    | {"ratio": times["sequential"].ms / took.ms, "all_reduces": reduces[name]}
                    | {"parallel_error": error if name == "fused" else None}
                )
    return rows


def main(args: list[str] | None = None) -> None:
    """Parses flags, runs, prints a table and writes rows."""
    flags = tyro.cli(Flags, args=args)
    if flags.smoke:
        flags = with_smoke(flags, **SMOKE)
    check_file("--out", flags.out)
    command = ["git", "rev-parse", "--short", "HEAD"]
    sha = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "git": sha}
    about |= json.loads(json.dumps(dataclasses.asdict(flags), default=str))
    rows = bench(flags)
    for row in rows:
        print(
            f"batch {row['batch']:3}  {row['form']:10} {row['ms']:8.4f} ms ({row['ms_min']:.4f} to "
            f"{row['ms_max']:.4f})  x{row['ratio']:.3f}  {row['all_reduces']:g} all-reduces per "
            "pass",
            flush=True,
        )
    if flags.out:
        with flags.out.open("a") as file:
            file.writelines(json.dumps(about | row) + "\n" for row in rows)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, UnsupportedError) as error:
        raise SystemExit(f"bench_fusion.py: {error}") from None
