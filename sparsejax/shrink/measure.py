"""What a model costs and is worth, measured: held-out loss, parameters, cache, decode latency."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sparsejax.analysis import cost
from sparsejax.config import ModelConfig
from sparsejax.decoding import MAX_STEPS_PER_CALL, Chooser, Decoder
from sparsejax.modules import Options
from sparsejax.params import count
from sparsejax.sampling import make_sampling
from sparsejax.training.evaluate import evaluate
from sparsejax.training.run import Run
from sparsejax.training.step import make_eval_step
from sparsejax.types import Params


@dataclasses.dataclass(frozen=True)
class DecodeTime:
    """Time of decode steps at one batch size.

    Attributes:
      batch: rows decoded together.
      ms_per_step: median over calls of the milliseconds of one step: one new token in each row.
      ms_least, ms_most: the fastest and the slowest call.
      steps: steps timed.
      context: positions in the cache when timing begins.
    """

    batch: int
    ms_per_step: float
    ms_least: float
    ms_most: float
    steps: int
    context: int


def decode_time(
    config: ModelConfig,
    params: Params,
    mesh: Mesh,
    batch: int,
    *,
    prompt: int = 64,
    calls: int = 5,
    steps_per_call: int = MAX_STEPS_PER_CALL,
    options: Options = Options(),
) -> DecodeTime:
    """Milliseconds of a greedy decode step, through the programs that generation runs.

    A first call, which compiles, is not timed. Prompt and steps have to fit the model's context, of
    which at most what it has is taken.

    Args:
      config: the model.
      params: its parameters, on `mesh`.
      mesh: where it runs.
      batch: rows decoded together.
      prompt: positions in the cache before the first step.
      calls: how many calls are timed.
      steps_per_call: steps of each.
      options: engine of the feed-forward layers.

    Raises:
      ValueError: a context too short for a prompt and two steps.
    """
    room = config.context_length
    steps = min(steps_per_call, MAX_STEPS_PER_CALL, (room - 1) // (calls + 1))
    if steps < 1:
        raise ValueError(
            f"decode_time: {calls} timed calls need a context of {calls + 2} positions, the model "
            f"has {room}; lower calls"
        )
    prompt = min(prompt, room - steps * (calls + 1))
    decoder = Decoder(config, options, mesh)
    params = decoder.cast(params)
    sampling = make_sampling(config.vocab_size, temperature=0.0)
    chooser = Chooser(sampling, None, np.array([-1], np.int32))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch, prompt), np.int32)
    lengths, ended = np.full(batch, prompt, np.int32), np.zeros(batch, bool)
    slots = prompt + steps * (calls + 1) + 1
    state, _ = decoder.prefill(params, tokens, lengths, ended, chooser, slots, None)
    times = []
    for _ in range(calls + 1):
        jax.block_until_ready(state)
        began = time.perf_counter()
        state, ids = decoder.decode(params, state, chooser, steps)
        jax.block_until_ready((state, ids))
        times.append((time.perf_counter() - began) / steps * 1e3)
    timed = times[1:]
    return DecodeTime(
        batch, statistics.median(timed), min(timed), max(timed), steps * calls, prompt + steps
    )


def held_out(run: Run, config: ModelConfig, params: Params) -> dict[str, Any] | None:
    """Cross-entropy and more on the run's held-out text; None where it has none.

    Args:
      run: gives text, batch size and mesh.
      config: any model on the run's vocabulary.
      params: its parameters, on the run's mesh.
    """
    if run.val_source is None:
        return None
    settings = run.config
    step = make_eval_step(config, settings.loss.vocab_chunk, settings.options(), run.mesh)
    reading: dict[str, Any] = {"shuffle": False, "drop_remainder": False, "worker_count": 0}
    loader = run.loader(run.val_source, num_epochs=1, **reading)
    with loader, jax.set_mesh(run.mesh):
        batches = itertools.islice(loader, settings.eval_batches)
        return evaluate(step, params, run.mesh, batches, run.val_source)


def measure(
    run: Run, config: ModelConfig, params: Params, batches: tuple[int, ...], context: int
) -> dict[str, Any]:
    """Everything that is reported of a model before and after, as JSON values.

    Args:
      run: gives text, batch size and mesh.
      config: the model.
      params: its parameters, on the run's mesh.
      batches: batch sizes whose decode latency is measured.
      context: positions for the bytes of the cache, per row.
    """
    found = held_out(run, config, params)
    times = [
        decode_time(config, params, run.mesh, batch, options=run.config.options())
        for batch in batches
    ]
    return {
        "layers": config.num_layers,
        "attentions": len(config.attention_layers),
        "d_ff": [layer.ffn.d_ff if layer.ffn else 0 for layer in config.layers],
        "parameters": count(params),
        "kv_cache_bytes": cost.estimate(config, context=context).kv_cache,
        "kv_cache_context": context,
        "ce": found["ce"] if found else None,
        "bits_per_byte": found["bits_per_byte"] if found else None,
        "held_out_tokens": found["tokens"] if found else 0,
        "decode": [dataclasses.asdict(t) for t in times],
    }
