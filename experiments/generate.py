"""Continues text with a trained model, written as it is made.

    python experiments/generate.py --workdir runs/mine --prompt "def main("

--workdir is a run of experiments/train.py, or a Hugging Face folder. Several --prompt flags are
generated as one batch, and each text is printed when it is finished.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import tyro

from pallas_kernels import UnsupportedError
from sparsejax.data import StreamDecoder
from sparsejax.evaluation import bos_choice, open_model
from sparsejax.generate import ENDED, MAX_STEPS_PER_CALL, stream
from sparsejax.modules import Options
from sparsejax.sharding import MeshConfig, make_mesh


@dataclasses.dataclass(frozen=True)
class Flags:
    """Continues text with a trained model.

    Attributes:
      workdir: folder of a run of experiments/train.py, or a Hugging Face folder.
      prompt: text to continue; may be given several times. Without one, a document is begun.
      step: checkpoint of a run; None takes the newest whole one.
      max_new_tokens: longest continuation; a document may end before.
      temperature: 0 takes the most probable token each time; higher is more varied.
      top_p: draw from the most probable tokens that together have this probability.
      top_k: draw from this many most probable tokens; None from all.
      seed: another seed draws another text.
      echo: write the prompt before its continuation.
      tokenizer: a tokenizer.json or "bytes", where the run's corpus is no longer in its place.
      bos: begin with the token that the tokenizer puts in front; without this flag, Hugging Face
        folders and runs converted from them do.
      no_bos: begin without it.
      mesh: how devices are used; the first data x fsdp x tensor of them, data=-1 for all.
      implementation: engine of the feed-forward op: "triton" (sparse, on a CUDA device), "xla"
        (dense), or None to choose.
      dtype: dtype to compute in; None takes the model's, but float32 on a CPU, where half precision
        is slow.
    """

    workdir: Path
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    step: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int | None = None
    seed: int = 0
    echo: bool = True
    tokenizer: str | None = None
    bos: tyro.conf.FlagCreatePairsOff[bool] = False
    no_bos: tyro.conf.FlagCreatePairsOff[bool] = False
    mesh: MeshConfig = MeshConfig(data=1)
    implementation: Literal["triton", "xla"] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


def main(args: list[str] | None = None) -> int:
    """Runs the script; returns its exit status."""
    flags = tyro.cli(Flags, args=args)
    wanted = flags.mesh.data * flags.mesh.fsdp * flags.mesh.tensor
    devices = jax.devices()
    mesh = make_mesh(flags.mesh, devices[:wanted] if 0 < wanted <= len(devices) else devices)
    model = open_model(
        flags.workdir,
        mesh,
        dtype=flags.dtype,
        step=flags.step,
        tokenizer=flags.tokenizer,
        bos=bos_choice(flags.bos, flags.no_bos),
    )
    tokenizer = model.text_tokenizer()
    texts = flags.prompt or ("",)
    prompts = [[*model.prefix, *tokenizer.encode(text)] or [tokenizer.eot_id] for text in texts]
    began = time.perf_counter()
    steps = stream(
        model.config,
        model.params,
        prompts,
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        top_p=flags.top_p,
        top_k=flags.top_k,
        key=jax.random.key(flags.seed),
        eos_id=model.stop_ids,
        num_tokens=tokenizer.vocab_size,
        options=Options(implementation=flags.implementation),
        mesh=mesh,
        steps_per_call=1 if len(prompts) == 1 else MAX_STEPS_PER_CALL,
    )
    clock = _Clock(began)
    decoders = [StreamDecoder(tokenizer) for _ in prompts]
    for decoder, ids in zip(decoders, prompts, strict=True):
        decoder.push(ids)  # a token's text may depend on the one before it
    opening = [text if flags.echo else "" for text in texts]
    if len(prompts) == 1:
        _write_as_made(opening[0], decoders[0], clock.count(steps), model.stop_ids)
    else:
        _write_when_finished(opening, decoders, clock.count(steps), model.stop_ids)
    source = model.name if model.step is None else f"the model of step {model.step}"
    print(clock.report(source), file=sys.stderr)
    return 0


def _write_as_made(
    opening: str, decoder: StreamDecoder, steps: Iterator[np.ndarray], ends: list[int]
) -> None:
    sys.stdout.write(opening)
    sys.stdout.flush()
    for ids in steps:
        sys.stdout.write(decoder.push(i for i in ids.tolist() if i not in ends))
        sys.stdout.flush()
    print(decoder.flush(), flush=True)


def _write_when_finished(
    opening: list[str],
    decoders: list[StreamDecoder],
    steps: Iterator[np.ndarray],
    ends: list[int],
) -> None:
    texts, waiting = list(opening), set(range(len(opening)))

    def write(row: int) -> None:
        waiting.discard(row)
        print(f"--- prompt {row + 1} of {len(texts)}\n{texts[row]}{decoders[row].flush()}\n")
        sys.stdout.flush()

    for ids in steps:
        for row in sorted(waiting):
            if ids[row] in (*ends, ENDED):
                write(row)
            else:
                texts[row] += decoders[row].push([ids[row]])
    for row in sorted(waiting):
        write(row)


class _Clock:
    """Counts tokens and time; the first step, with prompt and compilation, stands apart."""

    def __init__(self, began: float):
        self.began = self.first = self.last = began
        self.first_tokens = self.tokens = 0

    def count(self, steps: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        for ids in steps:
            self.last = time.perf_counter()
            self.tokens += int((ids != ENDED).sum())
            if self.first == self.began:
                self.first, self.first_tokens = self.last, self.tokens
            yield ids

    def report(self, source: str) -> str:
        seconds, later = self.last - self.first, self.tokens - self.first_tokens
        rate = f", then {later / seconds:,.0f} tokens/s" if later else ""
        return (
            f"[{self.tokens} tokens from {source}; "
            f"{self.first - self.began:.1f} s to the first (with compilation){rate}]"
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, FileNotFoundError, FloatingPointError, UnsupportedError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
