"""Config, parameters and tokenizer as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.config import ModelConfig
from sparsejax.convert import config_json, families
from sparsejax.convert.safetensors_io import DTYPES, MAX_SHARD_BYTES, Tensor, write_folder
from sparsejax.convert.tensors import cast, counterpart
from sparsejax.data import ByteTokenizer, HFTokenizer
from sparsejax.data.token_ids import CONFIG, GENERATION, TokenIds, read_token_ids
from sparsejax.params import check_params, flatten
from sparsejax.types import Params

# Copied along with tokenizer.json from where it lies.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def save(
    path: str | os.PathLike,
    config: ModelConfig,
    params: Params,
    tokenizer: HFTokenizer | ByteTokenizer | None = None,
    family: str | None = None,
    dtype: str | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    token_ids: TokenIds | None = None,
) -> str:
    """Writes a Hugging Face folder; loading it gives back the same bits.

    Shards, index and tokenizer files come first and config.json last, so that a folder whose
    writing was cut short does not load.

    Args:
      path: the folder, made if absent; must not hold a model, or a part of one, yet.
      config: the model.
      params: its parameters.
      tokenizer: its files are copied, and generation_config.json bars the ids it does not have.
        Bytes have no files, and the folder no tokenizer then.
      family: a name of `sparsejax.convert.FAMILIES`; None takes the first that can hold the model:
        llama for a plain one, deci where layers differ or lack a part.
      dtype: "float32", "bfloat16" or "float16"; None keeps each tensor's own.
      max_shard_bytes: largest file, where a tensor is no larger.
      token_ids: bos_token_id, eos_token_id and pad_token_id of config.json and
        generation_config.json, as `read_token_ids` gives them. None takes what lies beside the
        tokenizer (the folder it was loaded from), else its end mark as eos_token_id alone.

    Returns:
      The family's name.

    Raises:
      ValueError: the family (or, with None, every one) cannot hold the model: says why; parameters
        or a tokenizer that do not fit the config; a number that is infinite in `dtype`; or a
        folder that holds weights, a config.json or another tokenizer already.
    """
    check_params(config, params)
    allowed = [d.name for d in DTYPES.values()]
    if dtype is not None and dtype not in allowed:
        raise ValueError(f"dtype must be one of {allowed} or None, got {dtype!r}")
    chosen = families.for_config(config) if family is None else families.named(family)
    values = config_json.to_hf(config, chosen)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer} has ids up to {tokenizer.vocab_size - 1}, but the "
            f"embedding has vocab_size = {config.vocab_size} rows"
        )
    tokenizer = None if isinstance(tokenizer, ByteTokenizer) else tokenizer
    folder = Path(path)
    _refuse_leftovers(folder, tokenizer)
    tensors = dict(_tensor(p, leaf, dtype) for p, leaf in flatten(params).items())
    write_folder(folder, tensors, max_shard_bytes)
    # Named for old and new readers.
    common = dtype or _common_dtype(tensors)
    values |= {"torch_dtype": common, "dtype": common}
    ids = token_ids or carried_token_ids(tokenizer)
    values |= ids.get(CONFIG, {})
    generation: dict[str, Any] | None = ids.get(GENERATION)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
        if tokenizer.vocab_size < config.vocab_size:
            padding = range(tokenizer.vocab_size, config.vocab_size)
            # Where this file is, readers take no ids of config.json.
            base = ids.get(CONFIG, {}) if generation is None else generation
            generation = base | {"suppress_tokens": list(padding)}
    for name, text in chosen.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if generation is not None:
        _write_json(folder / GENERATION, generation)
    _write_json(folder / CONFIG, values)
    return chosen.name


def carried_token_ids(tokenizer: HFTokenizer | ByteTokenizer | None) -> TokenIds:
    """The ids beside the tokenizer unless its end mark is none of theirs; else that mark alone."""
    if not isinstance(tokenizer, HFTokenizer):
        return {}
    found = read_token_ids(tokenizer.path.parent)
    ends = [ids["eos_token_id"] for ids in found.values() if "eos_token_id" in ids]
    flat = [i for end in ends for i in (end if isinstance(end, list) else [end])]
    if found and (not flat or tokenizer.eot_id in flat):
        return found
    own = {"eos_token_id": tokenizer.eot_id}
    return {CONFIG: own, GENERATION: own}


def _tensor(path: str, leaf: jax.Array, dtype: str | None) -> tuple[str, Tensor]:
    name, layout = counterpart(path)
    kept = jnp.dtype(dtype or leaf.dtype)
    if kept not in DTYPES.values():
        raise ValueError(f"{path} has dtype {leaf.dtype}; pass dtype= to write it as another")

    def get() -> np.ndarray:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(f"{path} lies on devices of other processes; save from one process")
        host = np.asarray(leaf)
        host = cast(host, kept, path)
        bits = host.view(np.uint16) if kept.itemsize == 2 else host
        # A copy in their order: writing a strided view would write its bytes as they lie.
        return np.ascontiguousarray(layout.to_theirs(bits, leaf.shape)).view(kept)

    return name, Tensor(layout.shape(tuple(leaf.shape)), kept, get)


def _common_dtype(tensors: dict[str, Tensor]) -> str:
    widest = max((tensor.dtype for tensor in tensors.values()), key=lambda d: d.itemsize)
    return widest.name


def copy_tokenizer(tokenizer: HFTokenizer, folder: Path) -> None:
    """Copies tokenizer.json and what lies beside it into `folder`."""
    if _lies_in(tokenizer, folder):
        return
    for name in TOKENIZER_FILES:
        source = tokenizer.path if name == "tokenizer.json" else tokenizer.path.with_name(name)
        if source.is_file():
            shutil.copyfile(source, folder / name)


def _lies_in(tokenizer: HFTokenizer, folder: Path) -> bool:
    own = folder / "tokenizer.json"
    return own.is_file() and own.samefile(tokenizer.path)


def _refuse_leftovers(folder: Path, tokenizer: HFTokenizer | None) -> None:
    """What another model left would be read together with this one, at once or after a kill."""
    own = tokenizer is not None and _lies_in(tokenizer, folder)
    names = (CONFIG, GENERATION, *(() if own else TOKENIZER_FILES))
    found = [folder / name for name in names if (folder / name).exists()]
    if old := [*found, *sorted(folder.glob("pytorch_model*.bin*"))]:
        raise ValueError(
            f"{folder} holds {old[0].name} of another model already; name another folder or remove "
            "it"
        )


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
