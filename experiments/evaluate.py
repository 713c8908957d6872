"""Evaluates a model: perplexity on held-out text, multiple choice, lm-evaluation-harness.

    python experiments/evaluate.py --model runs/mine --data stdlib --out runs/mine/evaluation.json
    python experiments/evaluate.py --model models/llama --tasks questions.jsonl

--model is a run of experiments/train.py or a Hugging Face folder. With --out, a table and a picture
of the loss by position are written beside it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Literal

import jax
import tyro

from pallas_kernels import UnsupportedError
from sparsejax import distributed, evaluation
from sparsejax.data import TokenSource, open_source
from sparsejax.modules import Options
from sparsejax.sharding import MeshConfig, check_batch, make_mesh
from sparsejax.studies.flags import at_least, check_file
from sparsejax.training.checkpoint import CheckpointError

# What a user can mend: shown as one line, without a traceback.
EXPECTED = (
    ValueError, OSError, FloatingPointError, ModuleNotFoundError, UnsupportedError, CheckpointError
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Flags:
    """Evaluates a model: perplexity, multiple choice, tasks of lm-evaluation-harness.

    Attributes:
      model: a run of experiments/train.py, or a Hugging Face folder.
      data: "stdlib" (the running Python's standard library as bytes, for models of bytes), or a
        folder made by experiments/prepare_data.py with the model's tokenizer: measure perplexity on
        it.
      split: which part of it.
      window: tokens per window; None takes the model's context length, at most 2048.
      stride: from one window to the next; shorter than the window, each token sees more context.
      mask_documents: keep documents apart, as training with that flag does.
      max_tokens: score the first so many tokens only.
      tasks: multiple-choice questions, one JSON object per line with "question" (or "context"),
        "choices" and "answer", the right one's index.
      separator: what stands between a question and a choice.
      harness: tasks of lm-evaluation-harness (the extra "eval").
      harness_path: a folder with task files of your own.
      fewshot: examples before each question of the harness.
      limit: questions per task of the harness.
      out: a .json file for the results; it is written after each part.
      step: checkpoint of a run; None takes the newest whole one.
      tokenizer: a tokenizer.json or "bytes", where the model's is not in its place.
      bos: begin texts with the token that the tokenizer puts in front; without this flag, Hugging
        Face folders and runs converted from them do. A corpus is one text: the token stands before
        its first window alone, and later windows begin with the token before them.
      no_bos: begin texts without it.
      context_length: use the model up to this many positions only.
      batch_size: windows or choices at a time, over all devices.
      mesh: how devices are used; the first data x fsdp x tensor of them, data=-1 for all.
      implementation: engine of the feed-forward op; None to choose.
      dtype: dtype to compute in; None takes the model's, but float32 on a CPU.
    """

    model: Path
    data: str | None = None
    split: str = "val"
    window: int | None = None
    stride: int | None = None
    mask_documents: bool = False
    max_tokens: int | None = None
    tasks: tuple[Path, ...] = ()
    separator: str = " "
    harness: tuple[str, ...] = ()
    harness_path: Path | None = None
    fewshot: int | None = None
    limit: int | None = None
    out: Path | None = None
    step: int | None = None
    tokenizer: str | None = None
    bos: tyro.conf.FlagCreatePairsOff[bool] = False
    no_bos: tyro.conf.FlagCreatePairsOff[bool] = False
    context_length: int | None = None
    batch_size: int = 8
    mesh: MeshConfig = MeshConfig()
    implementation: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


def main(args: list[str] | None = None) -> int:
    """Runs the script; returns its exit status."""
    flags = tyro.cli(Flags, args=args)
    if not (flags.data or flags.tasks or flags.harness):
        raise ValueError("nothing to evaluate: give --data, --tasks or --harness")
    _refuse(flags, flags.data, "--data", "window", "stride", "mask_documents", "max_tokens")
    _refuse(flags, flags.tasks, "--tasks", "separator")
    _refuse(flags, flags.harness, "--harness", "harness_path", "fewshot", "limit")
    at_least(flags, 1, "window", "stride", "max_tokens", "limit", "context_length", "batch_size")
    at_least(flags, 0, "fewshot")
    distributed.initialize()
    if jax.process_index() == 0:
        check_file("--out", flags.out, ".json")
    # What can be wrong with inputs is found before the weights are read.
    if flags.harness:
        evaluation.require_harness()
    source = open_source(flags.data, flags.split) if flags.data else None
    questions = {str(file): evaluation.read_questions(file) for file in flags.tasks}
    wanted = flags.mesh.data * flags.mesh.fsdp * flags.mesh.tensor
    devices = jax.devices()
    mesh = make_mesh(flags.mesh, devices[:wanted] if 0 < wanted <= len(devices) else devices)
    check_batch(mesh, flags.batch_size)
    model = evaluation.open_model(
        flags.model,
        mesh,
        dtype=flags.dtype,
        step=flags.step,
        tokenizer=flags.tokenizer,
        bos=evaluation.bos_choice(flags.bos, flags.no_bos),
        context_length=flags.context_length,
        options=Options(implementation=flags.implementation),
    )
    if source is not None:
        model.check_source(source)
    settings = json.loads(json.dumps(dataclasses.asdict(flags), default=str))
    with evaluation.Results(flags.out, model, settings) as report:
        _evaluate(flags, model, source, questions, report)
    return 0


def _evaluate(
    flags: Flags,
    model: evaluation.EvalModel,
    source: TokenSource | None,
    questions: dict[str, list[evaluation.Question]],
    report: evaluation.Results,
) -> None:
    if source is not None:
        found = evaluation.perplexity(
            model,
            source,
            window=flags.window,
            stride=flags.stride,
            batch_size=flags.batch_size,
            mask_documents=flags.mask_documents,
            max_tokens=flags.max_tokens,
            progress=True,
        )
        report.add("perplexity", found.to_dict(), str(found))
        if flags.out is not None and jax.process_index() == 0:
            evaluation.write_curve(found, flags.out.parent, f"{flags.out.stem}_by_position")
    for file, rows in questions.items():
        scored = evaluation.multiple_choice(
            model, rows, separator=flags.separator, batch_size=flags.batch_size, progress=True
        )
        report.add("multiple_choice", {file: scored.to_dict()}, f"{file}: {scored}")
    if flags.harness:
        tables = evaluation.run_harness(
            model,
            flags.harness,
            include_path=flags.harness_path,
            num_fewshot=flags.fewshot,
            limit=flags.limit,
            batch_size=flags.batch_size,
        )
        report.add("harness", tables, json.dumps(tables["results"], indent=1, default=str))


def _refuse(flags: Flags, given: object, owner: str, *names: str) -> None:
    """Flags that would do nothing are errors."""
    for name in [n for n in names if not given and getattr(flags, n) != getattr(Flags, n)]:
        raise ValueError(f"--{name.replace('_', '-')} has no meaning without {owner}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EXPECTED as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
