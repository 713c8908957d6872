"""What is evaluated: a model, its tokenizer and its mesh, from a run or a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path

import jax
from jax.sharding import Mesh

from sparsejax import convert
from sparsejax.config import ModelConfig
from sparsejax.data import (
    ByteTokenizer,
    HFTokenizer,
    Tokenizer,
    TokenSource,
    check_vocab,
)
from sparsejax.data.token_ids import end_ids, read_token_ids
from sparsejax.modules import Options
from sparsejax.sharding import make_mesh
from sparsejax.training.initial import check_tokenizer, folder_kind, run_tokenizer
from sparsejax.training.load import load_model
from sparsejax.types import Params


@dataclasses.dataclass(frozen=True, eq=False)
class EvalModel:
    """A model that can be evaluated.

    Attributes:
      name: where it comes from, for messages.
      config: the model; its `dtype` is what is computed in.
      params: its parameters, placed on `mesh`.
      mesh: rows go over data and fsdp, heads, neurons and vocabulary over tensor.
      tokenizer: text to ids; None where it is not known.
      prefix: ids that every text begins with (the beginning-of-sequence token of many published
        models); empty for none.
      step: training step of a run, else None.
      options: how forward passes run.
      data: corpus of a run, where its tokenizer was looked for.
      end_ids: ids that the folder names as ends of a text, beside the tokenizer's.
    """

    name: str
    config: ModelConfig
    params: Params
    mesh: Mesh
    tokenizer: Tokenizer | None = None
    prefix: tuple[int, ...] = ()
    step: int | None = None
    options: Options = Options()
    data: str = ""
    end_ids: tuple[int, ...] = ()

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end a generated text: the tokenizer's end mark, and those the folder names.

        A chat model names several: the end of a turn is not the end of a text.
        """
        return sorted({self.text_tokenizer().eot_id, *self.end_ids})

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
          ValueError: it is not known.
        """
        if self.tokenizer is None:
            place = f" (it was looked for in {self.data})" if self.data else ""
            raise ValueError(
                f"{self.name} has no tokenizer, or it is no longer in its place{place}; give "
                "tokenizer= (--tokenizer) a tokenizer.json, or 'bytes'"
            )
        return self.tokenizer

    @property
    def num_tokens(self) -> int:
        """Ids that stand for text; the embedding may have more rows."""
        return self.config.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size

    def check_source(self, source: TokenSource) -> None:
        """Raises a ValueError unless `source` was tokenised as this model's text is."""
        check_tokenizer(source, self.tokenizer, self.name)
        check_vocab(source, self.config.vocab_size)


def bos_choice(bos: bool, no_bos: bool) -> bool | None:
    """`bos` of `open_model` from a script's flags --bos and --no-bos; None without either.

    Raises:
      ValueError: both are given.
    """
    if bos and no_bos:
        raise ValueError("--bos and --no-bos exclude each other; give one of them, or none")
    return True if bos else False if no_bos else None


def open_model(
    path: str | os.PathLike,
    mesh: Mesh | None = None,
    *,
    dtype: str | None = None,
    step: int | None = None,
    tokenizer: str | None = None,
    bos: bool | None = None,
    context_length: int | None = None,
    ignore_keys: Collection[str] = (),
    options: Options = Options(),
) -> EvalModel:
    """Opens a run of experiments/train.py, or a Hugging Face folder.

    Args:
      path: the folder.
      mesh: where the parameters go; None takes the first device.
      dtype: what to compute in; None takes the model's, but float32 on a CPU, where half precision
        is slow.
      step: checkpoint of a run; None takes the newest whole one.
      tokenizer: a tokenizer.json or "bytes", where the model's is not in its place.
      bos: begin every text with what the tokenizer itself puts in front of one; None does so for
        Hugging Face folders and for runs converted from them. Runs are trained without.
      context_length: use the model up to this many positions only.
      ignore_keys: as for `sparsejax.convert.load`.
      options: how forward passes run.

    Raises:
      FileNotFoundError: no such folder, or neither kind of model in it.
      ValueError: a damaged folder, a tokenizer with more ids than the model, or arguments that do
        not fit the model.
    """
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    folder, kind, data = Path(path), folder_kind(path), ""
    found: Tokenizer | None
    if kind == "run":
        loaded = load_model(folder, step=step, mesh=mesh)
        config, params, step, data = loaded.config, loaded.params, loaded.step, loaded.data
        found = None if tokenizer else run_tokenizer(loaded.data)
        if context_length is not None and not 1 <= context_length <= config.context_length:
            raise ValueError(
                "context_length must be at least 1 and at most the model's "
                f"{config.context_length}, got {context_length}"
            )
    else:
        if step is not None:
            raise ValueError(f"step is for runs; {folder} is a Hugging Face folder")
        config, params, found = convert.load(
            folder, mesh, dtype, context_length=context_length, ignore_keys=ignore_keys
        )
    if tokenizer is not None:
        found = ByteTokenizer() if tokenizer == "bytes" else HFTokenizer(tokenizer)
    if found is not None and found.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {found.vocab_size} ids, but the model {folder} has only "
            f"{config.vocab_size}: they do not belong together"
        )
    on_cpu = jax.default_backend() == "cpu"
    config = config.replace(
        dtype=dtype or ("float32" if on_cpu else config.dtype),
        context_length=context_length or config.context_length,
    )
    prefix: tuple[int, ...] = ()
    if isinstance(found, HFTokenizer) and bos is not False:
        named_hf = kind == "hf" and tokenizer is not None
        prefix = found.added_in_front() if bos or named_hf else found.prefix
    if bos and not prefix:
        raise ValueError("bos was asked for, but the tokenizer puts nothing in front of a text")
    ends = end_ids(read_token_ids(folder if kind == "hf" else folder / "tokenizer"))
    ends = tuple(i for i in ends if i < (config.vocab_size if found is None else found.vocab_size))
    return EvalModel(str(folder), config, params, mesh, found, prefix, step, options, data, ends)
