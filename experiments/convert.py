"""Converts a model between Hugging Face's folders and this project's runs, either way.

    python experiments/convert.py --from models/llama --to runs/llama
    python experiments/generate.py --workdir runs/llama --prompt "Once upon a time"
    python experiments/convert.py --from runs/mine --to models/mine

The direction follows from what --from holds: checkpoints/ is a run, config.json with safetensors is
a Hugging Face folder.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import tyro

from sparsejax import convert
from sparsejax.config import ModelConfig
from sparsejax.data import ByteTokenizer, HFTokenizer, Tokenizer
from sparsejax.params import count
from sparsejax.sharding import MeshConfig, make_mesh
from sparsejax.studies.flags import at_least
from sparsejax.training.checkpoint import CheckpointError
from sparsejax.types import Params


@dataclasses.dataclass(frozen=True)
class Flags:
    """Converts a model between Hugging Face's folders and runs, either way.

    Attributes:
      source: the folder to read, a Hugging Face folder or a run.
      target: the folder to write.
      dtype: dtype of the weights written; None keeps it.
      family: format of a Hugging Face folder that is written; None takes the first that can hold
        the model.
      step: checkpoint of a run; None takes the newest whole one.
      context_length: use the model up to this many positions only.
      ignore_keys: keys of config.json that are known to leave the mathematics alone.
      report: a text file to measure on how near zero the activations are (from a Hugging Face
        folder).
      report_tokens: how much of that file to read.
      tokenizer: a tokenizer.json or "bytes" to read that file with, where the folder has none.
      mesh: for models larger than one device's memory: how devices are used, the first data x fsdp
        x tensor of them, data=-1 for all.
    """

    source: Annotated[Path, tyro.conf.arg(name="from")]
    target: Annotated[Path, tyro.conf.arg(name="to")]
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    family: str | None = None
    step: int | None = None
    context_length: int | None = None
    ignore_keys: tuple[str, ...] = ()
    report: Path | None = None
    report_tokens: int = 2048
    tokenizer: str | None = None
    mesh: MeshConfig = MeshConfig(data=1)


def main(args: list[str] | None = None) -> int:
    """Runs the script; returns its exit status."""
    flags = tyro.cli(Flags, args=args)
    at_least(flags, 1, "context_length", "report_tokens")
    if flags.report is None and flags.tokenizer is not None:
        raise ValueError("--tokenizer reads the text of --report; it has no meaning without that")
    wanted = flags.mesh.data * flags.mesh.fsdp * flags.mesh.tensor
    devices = jax.devices()
    mesh = make_mesh(flags.mesh, devices[:wanted] if 0 < wanted <= len(devices) else devices)
    if (flags.source / "checkpoints").is_dir():
        _refuse(flags, "a run", "context_length", "ignore_keys", "report")
        config, params, tokenizer = convert.load_run(flags.source, mesh, step=flags.step)
        family = convert.save(
            flags.target,
            config,
            params,
            tokenizer,
            family=flags.family,
            dtype=flags.dtype,
            token_ids=convert.read_token_ids(flags.source / "tokenizer"),
        )
        written = f"a Hugging Face folder of the family {family}"
    elif (flags.source / "config.json").is_file():
        _refuse(flags, "a Hugging Face folder", "family", "step")
        config, params, tokenizer = convert.load(
            flags.source,
            mesh,
            dtype=flags.dtype,
            context_length=flags.context_length,
            ignore_keys=flags.ignore_keys,
        )
        if flags.report is not None:
            print(_report(flags, config, params, tokenizer))
        token_ids = convert.read_token_ids(flags.source)
        convert.save_run(flags.target, config, params, tokenizer, token_ids=token_ids)
        written = "a run"
    else:
        raise ValueError(
            f"--from {flags.source} holds neither checkpoints/ (a run of experiments/train.py) nor "
            "config.json (a Hugging Face folder)"
        )
    words = "without a tokenizer" if tokenizer is None else f"with {tokenizer.vocab_size} tokens"
    if isinstance(tokenizer, ByteTokenizer):
        words = "without a tokenizer: its tokens are bytes (--tokenizer bytes)"
    print(
        f"{flags.target}: {written}, {count(params):,} parameters in {config.num_layers} layers, "
        f"{words}"
    )
    return 0


def _refuse(flags: Flags, kind: str, *names: str) -> None:
    """Flags that would do nothing are errors."""
    defaults = {field.name: field.default for field in dataclasses.fields(Flags)}
    for name in names:
        if getattr(flags, name) != defaults[name]:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} has no meaning where --from is {kind}; leave it out")


def _report(
    flags: Flags, config: ModelConfig, params: Params, tokenizer: Tokenizer | None
) -> convert.SparsityReport:
    assert flags.report is not None
    if flags.tokenizer is not None:
        named = flags.tokenizer
        tokenizer = ByteTokenizer() if named == "bytes" else HFTokenizer(named)
    if tokenizer is None:
        raise ValueError(
            f"--report needs a tokenizer, and {flags.source} has no tokenizer.json; name one, or "
            "'bytes', with --tokenizer"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"--report: the tokenizer has {tokenizer.vocab_size} ids, but the model has only "
            f"{config.vocab_size}: they do not belong together"
        )
    ids = tokenizer.encode(flags.report.read_text(encoding="utf-8"))[: flags.report_tokens]
    length = min(512, config.context_length, len(ids))
    if not ids:
        raise ValueError(f"--report {flags.report} has no text in it")
    rows = len(ids) // length
    tokens = np.asarray(ids[: rows * length], np.int32).reshape(rows, length)
    return convert.sparsity_report(config, params, tokens)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError, CheckpointError) as error:  # what a user can mend
        sys.exit(f"{Path(__file__).name}: {error}")
