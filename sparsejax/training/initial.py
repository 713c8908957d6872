"""Starting a run from given weights: a run's folder or a Hugging Face folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sparsejax.config import ModelConfig
from sparsejax.convert.config_json import from_hf, read_json
from sparsejax.convert.load import load, load_tokenizer
from sparsejax.convert.safetensors_io import open_folder
from sparsejax.data import (
    DataNotFoundError,
    HFTokenizer,
    Tokenizer,
    TokenSource,
    open_tokenizer,
)
from sparsejax.data.folder import BYTE_TOKENIZER, read_meta
from sparsejax.data.sources import KNOWN_CORPORA
from sparsejax.training.checkpoint import Checkpointer
from sparsejax.training.load import load_model
from sparsejax.training.workdir import Workdir
from sparsejax.types import Params

_PROBED_IDS = 512


def folder_kind(path: str | os.PathLike) -> Literal["run", "hf"]:
    """What a model's folder is: one of experiments/train.py, or one of Hugging Face.

    Raises:
      FileNotFoundError: no such folder, or neither.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = f"{folder} is a file" if folder.exists() else f"no folder {folder}"
        raise FileNotFoundError(f"{what}; expected a run or a Hugging Face folder")
    if Workdir(folder).checkpoints.is_dir():
        return "run"
    if (folder / "config.json").is_file():
        return "hf"
    raise FileNotFoundError(
        f"{folder} holds no model: neither {Workdir(folder).checkpoints.name}/ (a run of "
        "experiments/train.py) nor config.json (a Hugging Face folder)"
    )


def initial_config(path: str | os.PathLike) -> ModelConfig:
    """The model of a folder, as it is trained on: parameters in float32, whatever they lie in.

    Computation keeps the folder's dtype, but for float16, whose gradients underflow: bfloat16.

    Raises:
      FileNotFoundError: no model there.
      ValueError: a damaged folder, or a config that is not supported.
    """
    folder = Path(path)
    if folder_kind(folder) == "run":
        with Checkpointer(Workdir(folder).checkpoints) as checkpointer:
            config = ModelConfig.from_dict(checkpointer.read_extra()["config"])
        dtype = config.dtype
    else:
        config = from_hf(read_json(folder / "config.json"), f"{folder}/config.json")
        halves = {entry.dtype for entry in open_folder(folder).values()} - {"F32"}
        dtype = "bfloat16" if halves else "float32"
    dtype = "bfloat16" if dtype == "float16" else dtype
    return config.replace(dtype=dtype, param_dtype="float32")


def saved_config(workdir: Path) -> ModelConfig | None:
    """The model of a run's newest whole checkpoint; None where it has saved nothing yet."""
    checkpoints = Workdir(workdir).checkpoints
    if not checkpoints.is_dir():
        return None
    with Checkpointer(checkpoints) as checkpointer:
        if checkpointer.is_empty():
            return None
        return ModelConfig.from_dict(checkpointer.read_extra()["config"])


def initial_params(path: str | os.PathLike, mesh: Mesh) -> Params:
    """The folder's parameters in float32, each part read straight to its device.

    Raises:
      FileNotFoundError: no model there.
      ValueError: a damaged folder, or a mesh that does not fit the model.
    """
    if folder_kind(path) == "hf":
        return load(path, mesh, "float32")[1]
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), load_model(path, mesh=mesh).params)


def weights_digest(path: str | os.PathLike) -> str:
    """16 hex digits that tell the folder's parameters from others; nothing is loaded.

    Of a run's newest whole checkpoint, or of the bytes of a Hugging Face folder's files.

    Raises:
      FileNotFoundError: no model there.
    """
    found = hashlib.sha256()
    if folder_kind(path) == "hf":
        for file in sorted(Path(path).glob("*.safetensors")):
            with file.open("rb") as content:
                found.update(hashlib.file_digest(content, "sha256").digest())
    else:
        with Checkpointer(Workdir(Path(path)).checkpoints) as checkpointer:
            digests = checkpointer.read_digests()
        for name in sorted(name for name in digests if name.startswith("params/")):
            found.update(f"{name} {digests[name]}\n".encode())
    return found.hexdigest()[:16]


def saved_corpus(path: str | os.PathLike) -> str:
    """The name of the corpus that a run was trained on, as its newest whole checkpoint has it."""
    with Checkpointer(Workdir(Path(path)).checkpoints) as checkpointer:
        return checkpointer.read_extra()["data"]["name"]


def run_corpus(path: str | os.PathLike) -> str | None:
    """The corpus that a folder's run was trained on, also where it no longer is in its place.

    None for other folders, and for runs that were written without text (by surgery, say).

    Raises:
      FileNotFoundError: no model there.
    """
    if folder_kind(path) != "run":
        return None
    name = saved_corpus(path)
    without_text = Path(name).is_dir() and (
        not (Path(name) / "meta.json").is_file() or "train" not in read_meta(Path(name))["splits"]
    )
    return None if name not in KNOWN_CORPORA and without_text else name


def initial_tokenizer(path: str | os.PathLike) -> Tokenizer | None:
    """What the folder's model was trained to read; None where it is not known."""
    folder = Path(path)
    if folder_kind(folder) == "hf":
        return load_tokenizer(folder)
    return run_tokenizer(saved_corpus(folder))


def run_tokenizer(data: str) -> Tokenizer | None:
    """The tokenizer of a run's data; None where that is no longer in its place."""
    try:
        return open_tokenizer(data)
    except DataNotFoundError:
        return None


def check_tokenizer(source: TokenSource, theirs: Tokenizer | None, name: str) -> None:
    """Raises a ValueError unless `source` was tokenised as the text of the model `name` is."""
    if difference := tokenizer_difference(source.tokenizer, theirs):
        own = theirs.path if isinstance(theirs, HFTokenizer) else BYTE_TOKENIZER
        raise ValueError(
            f"corpus {source.label} was tokenised with another tokenizer than that of {name} "
            f"(corpus vs model): {difference}; prepare the text with the model's own: python "
            f"experiments/prepare_data.py --inputs TEXT --tokenizer {own} --out FOLDER"
        )


def tokenizer_difference(ours: Tokenizer | None, theirs: Tokenizer | None) -> str | None:
    """An id that two tokenizers read differently, in words; None where none is found.

    Some 500 ids spread over the smaller vocabulary are looked at, the end marks left out.
    """
    if ours is None or theirs is None:
        return None
    size, ends = min(ours.vocab_size, theirs.vocab_size), {ours.eot_id, theirs.eot_id}
    for i in sorted({n * size // _PROBED_IDS for n in range(_PROBED_IDS)} - ends):
        if ours.decode([i]) != theirs.decode([i]):
            return f"id {i} is {ours.decode([i])!r} vs {theirs.decode([i])!r}"
    return None
