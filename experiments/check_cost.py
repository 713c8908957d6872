"""Decode steps as the cost model has them and as they are, side by side.

    python experiments/check_cost.py --presets 1b-dense llama-3.1-8b --batches 1 32 --out rows.jsonl
    python experiments/check_cost.py --presets tiny --batches 1 --context 64      # runs on a CPU

Each preset is timed as it is and with its middle quarter of attentions removed and those layers'
feed-forward parts fused (all but the last). Weights are random, in the model's compute dtype. One
call makes --steps tokens per row on the device, with the cache full to --context.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import sparsejax
from pallas_kernels import UnsupportedError
from sparsejax import presets, surgery
from sparsejax.analysis import cost, fusion_groups
from sparsejax.analysis.devices import get_device
from sparsejax.attention import init_cache
from sparsejax.config import ModelConfig
from sparsejax.decoding import Chooser, Decoder, State
from sparsejax.sampling import make_sampling
from sparsejax.studies.flags import at_least, check_file, not_empty


@dataclasses.dataclass(frozen=True)
class Flags:
    """Times decode steps and compares them with `sparsejax.analysis.cost`.

    Attributes:
      presets: names of `sparsejax.presets`.
      batches: rows decoded together.
      context: positions in the cache, of which the last --steps are decoded.
      steps: tokens per row in one call.
      calls: calls timed, of which the median counts.
      device: name in `sparsejax.analysis.cost.DEVICES`.
      out: a .jsonl file to append to.
    """

    presets: tuple[str, ...] = ("1b-dense", "llama-3.1-8b")
    batches: tuple[int, ...] = (1, 32)
    context: int = 1024
    steps: int = 32
    calls: int = 5
    device: str = "h200"
    out: Path | None = None


def shallower(config: ModelConfig) -> ModelConfig:
    """The middle quarter without attention, all but the last of its FFNs in one."""
    m = config.num_layers
    shapes = sparsejax.param_shapes(config)
    config, _ = surgery.remove_attention(config, shapes, range(3 * m // 8, 3 * m // 8 + m // 4))
    return surgery.plan_fusion(config, fusion_groups(config))[0]


def decode_seconds(config: ModelConfig, batch: int, flags: Flags) -> float:
    """Median seconds of one decode step."""
    params = sparsejax.init_params(config, jax.random.key(0))
    decoder = Decoder(config)
    chooser = Chooser(make_sampling(config.vocab_size), None, np.array([-1], np.int32))
    times = []
    for _ in range(flags.calls + 1):
        position = jnp.full((batch,), flags.context - flags.steps, jnp.int32)
        zeros = jnp.zeros((batch,), jnp.int32)
        cache = init_cache(config, batch, flags.context)
        # The donated buffers of a cache must differ: keys and values start as one array.
        cache = jax.tree.map(jnp.copy, cache)
        state = State(cache, zeros, position, jnp.zeros((batch,), bool), jnp.int32(0))
        jax.block_until_ready(state)
        began = time.perf_counter()
        state, _ = decoder.decode(params, state, chooser, flags.steps)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - began) / flags.steps)
    return statistics.median(times[1:])  # the first one compiles


def main(flags: Flags) -> None:
    """Prints and appends one row per model and batch."""
    not_empty(flags, "presets")
    at_least(flags, 1, "batches", "context", "steps", "calls")
    if flags.context < flags.steps:
        raise ValueError(
            f"--context {flags.context} has no room for --steps {flags.steps}: the steps fill the "
            "cache up to it, so it must be at least as many"
        )
    get_device(flags.device)
    configs = {name: presets.get(name) for name in flags.presets}
    check_file("--out", flags.out)
    for name, config in configs.items():
        config = config.replace(param_dtype=config.dtype)
        for what, model in ((name, config), (f"{name}, shallower", shallower(config))):
            for batch in flags.batches:
                want = cost.estimate(
                    model, device=flags.device, batch=batch, context=flags.context
                ).latency
                got = decode_seconds(model, batch, flags)
                row = {
                    "model": what,
                    "batch": batch,
                    "context": flags.context,
                    "modelled_ms": 1e3 * want,
                    "measured_ms": 1e3 * got,
                    "ratio": got / want,
                    "device": jax.devices()[0].device_kind,
                    "jax": jax.__version__,
                }
                print(json.dumps(row), flush=True)
                if flags.out is not None:
                    with flags.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(Flags))
    except (ValueError, UnsupportedError) as error:
        raise SystemExit(f"check_cost.py: {error}") from None
