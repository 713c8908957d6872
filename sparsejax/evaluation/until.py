"""Text generated up to a stop string, for many prompts with settings of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from sparsejax.data import StreamDecoder
from sparsejax.evaluation.models import EvalModel
from sparsejax.generate import ENDED, MAX_STEPS_PER_CALL, compute_params, stream
from sparsejax.types import Params

# Names that tasks of lm-evaluation-harness have for the longest generation.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """How one text is continued.

    Attributes:
      until: the text ends before the first of these.
      max_new_tokens: longest continuation.
      temperature: 0 takes the most probable token.
      top_p: see `sparsejax.generate.generate`.
      top_k: see there.
    """

    until: tuple[str, ...] = ()
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None

    @classmethod
    def from_harness(cls, values: dict[str, Any], max_new_tokens: int) -> GenerationSettings:
        """From a task's generation_kwargs; `do_sample: false` is greedy, whatever the temperature.

        Raises:
          ValueError: a setting that is not supported; names it.
        """
        values = dict(values)
        until = values.pop("until", None) or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        lengths = [values.pop(name, None) for name in _LENGTHS]
        length = next((n for n in lengths if n is not None), max_new_tokens)
        sample = values.pop("do_sample", None)
        temperature = values.pop("temperature", 1.0 if sample else 0.0)
        top_p, top_k = values.pop("top_p", 1.0), values.pop("top_k", None)
        if values:
            raise ValueError(
                f"generation setting {next(iter(values))!r} = {next(iter(values.values()))!r} is "
                f"not supported; known: until, {', '.join(_LENGTHS)}, do_sample, temperature, "
                "top_p, top_k"
            )
        if sample is False or not temperature:
            return cls(until, int(length))
        return cls(until, int(length), float(temperature), float(top_p), top_k or None)


def generate_until(
    model: EvalModel,
    prompts: Sequence[str],
    settings: Sequence[GenerationSettings],
    *,
    batch_size: int = 8,
    seed: int = 0,
    progress: bool = False,
) -> tuple[list[str], int]:
    """Continues each prompt, to its end mark or before a stop string.

    Prompts that are too long for the model with what is to come lose their first tokens.

    Args:
      model: needs a tokenizer.
      prompts: the texts.
      settings: one per prompt; those with equal ones share batches.
      batch_size: prompts at a time, over all devices.
      seed: for sampling; what a prompt gets does not depend on the others.
      progress: show a progress bar.

    Returns:
      The new texts, and how many prompts were cut.

    Raises:
      ValueError: max_new_tokens leaves no room for a prompt.
      FloatingPointError: logits are NaN or infinite.
    """
    tokenizer, context = model.text_tokenizer(), model.config.context_length
    rows: list[list[int]] = []
    cut = 0
    for prompt, wanted in zip(prompts, settings, strict=True):
        room = context - wanted.max_new_tokens
        if room < 1 or wanted.max_new_tokens < 0:
            raise ValueError(
                f"max_new_tokens must be in [0, context length - 1 = {context - 1}], got "
                f"{wanted.max_new_tokens}"
            )
        ids = [*model.prefix, *tokenizer.encode(prompt)] or [tokenizer.eot_id]
        cut += len(ids) > room
        rows.append(ids[-room:])
    params = compute_params(model.config, model.params) if rows else model.params
    answers: dict[int, str] = {}
    hide = None if progress and jax.process_index() == 0 else True  # None: on terminals only
    with tqdm(total=len(rows), unit="text", disable=hide) as bar:
        for wanted in dict.fromkeys(settings):
            same = [i for i in range(len(rows)) if settings[i] == wanted]
            same.sort(key=lambda i: -len(rows[i]))
            for begin in range(0, len(same), batch_size):
                chosen = same[begin : begin + batch_size]
                answers |= _batch(model, params, rows, chosen, wanted, batch_size, seed)
                bar.update(len(chosen))
    return [answers[i] for i in range(len(rows))], cut


def _batch(
    model: EvalModel,
    params: Params,
    rows: list[list[int]],
    chosen: list[int],
    wanted: GenerationSettings,
    batch_size: int,
    seed: int,
) -> dict[int, str]:
    tokenizer = model.text_tokenizer()
    # The last batch repeats a prompt, so that it needs no program of its own.
    filled = chosen + chosen[-1:] * (batch_size - len(chosen))
    key = jax.random.key(seed)
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    steps = stream(
        model.config,
        params,
        [rows[i] for i in filled],
        max_new_tokens=wanted.max_new_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        key=fold(key, jnp.asarray(filled)) if wanted.temperature else None,
        eos_id=tokenizer.eot_id,
        num_tokens=model.num_tokens,
        options=model.options,
        mesh=model.mesh,
        steps_per_call=MAX_STEPS_PER_CALL,
    )
    decoders = [StreamDecoder(tokenizer) for _ in chosen]
    for decoder, i in zip(decoders, chosen, strict=True):
        decoder.push(rows[i])  # a token's text may depend on the one before it
    texts = [""] * len(chosen)
    going = set(range(len(chosen)))
    for ids in steps:
        for row in sorted(going):
            if ids[row] in (tokenizer.eot_id, ENDED):
                going.discard(row)
                continue
            texts[row] += decoders[row].push([int(ids[row])])
            if any(stop in texts[row] for stop in wanted.until if stop):
                going.discard(row)
        if not going:
            break
    answers = {}
    for row, i in enumerate(chosen):
        text = texts[row] + decoders[row].flush()
        ends = [text.find(stop) for stop in wanted.until if stop and stop in text]
        answers[i] = text[: min(ends, default=len(text))]
    return answers
