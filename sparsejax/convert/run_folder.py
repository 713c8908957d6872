"""A converted model as a run's folder, which `experiments/generate.py` takes as its --workdir.

config.json  checkpoints/0  tokenizer/{meta,tokenizer,token_ids}.json
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.config import ModelConfig
from sparsejax.convert.save import carried_token_ids, copy_tokenizer
from sparsejax.data import ByteTokenizer, HFTokenizer, open_tokenizer
from sparsejax.data.folder import BYTE_TOKENIZER
from sparsejax.data.sources import KNOWN_CORPORA
from sparsejax.data.token_ids import TokenIds, write_token_ids
from sparsejax.training.checkpoint import Checkpointer
from sparsejax.training.load import load_model
from sparsejax.training.workdir import Workdir
from sparsejax.types import Params


def save_run(
    path: str | os.PathLike,
    config: ModelConfig,
    params: Params,
    tokenizer: HFTokenizer | ByteTokenizer | None = None,
    *,
    token_ids: TokenIds | None = None,
) -> None:
    """Writes a run's folder with one checkpoint, of step 0 and without optimiser state.

    Args:
      path: the folder; must not hold checkpoints or a config.json yet.
      config: the model.
      params: its parameters.
      tokenizer: copied, and named as the run's data, which generation asks for the tokenizer. Its
        `prefix` is what generation and evaluation of the run begin texts with. None leaves the run
        without one.
      token_ids: as for `save`, which a later export writes again.

    Raises:
      ValueError: the folder holds checkpoints or a config.json already.
    """
    workdir = Workdir(Path(path))
    if workdir.checkpoints.is_dir() and any(workdir.checkpoints.iterdir()):
        raise ValueError(f"{workdir.root} holds checkpoints already; name another folder")
    if workdir.config.exists():  # such as the one of the folder that the model was read from
        raise ValueError(f"{workdir.root} holds {workdir.config.name} already; name another folder")
    corpus = workdir.root.absolute() / "tokenizer"
    corpus.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        meta: dict[str, Any] = {"vocab_size": config.vocab_size, "eot_id": tokenizer.eot_id}
        meta["splits"] = {}
        if isinstance(tokenizer, HFTokenizer):
            copy_tokenizer(tokenizer, corpus)
            meta |= {"prefix": list(tokenizer.prefix)} if tokenizer.prefix else {}
        else:
            meta["tokenizer"] = BYTE_TOKENIZER
        (corpus / "meta.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")
    write_token_ids(corpus, token_ids or carried_token_ids(tokenizer))
    step = jnp.zeros((), jnp.int32)
    first = jax.tree.leaves(params)[0]
    if isinstance(first.sharding, NamedSharding):
        step = jax.device_put(step, NamedSharding(first.sharding.mesh, P()))
    with Checkpointer(workdir.checkpoints) as checkpointer:
        extra = {"config": config.to_dict(), "data": {"name": str(corpus)}}
        checkpointer.save(0, {"params": params, "step": step}, extra)
    workdir.config.write_text(json.dumps({"model": config.to_dict()}, indent=1) + "\n", "utf-8")


def load_run(
    path: str | os.PathLike, mesh: Mesh | None = None, *, step: int | None = None
) -> tuple[ModelConfig, Params, HFTokenizer | ByteTokenizer | None]:
    """The model of a run's folder: (config, params, tokenizer), as `load` gives them.

    Args:
      path: a folder of experiments/train.py, or one of `save_run`.
      mesh: where the parameters go.
      step: the checkpoint; None takes the newest whole one.

    Returns:
      The config, the parameters, and the tokenizer of the run's data: None where the data is no
      longer in its place, or has none.

    Raises:
      FileNotFoundError: no such run or checkpoint.
      ValueError: the run's tokenizer is damaged, or the mesh does not fit the model.
    """
    model = load_model(path, step=step, mesh=mesh)
    data, tokenizer = model.data, None
    if data in KNOWN_CORPORA or (Path(data) / "meta.json").is_file():
        tokenizer = open_tokenizer(data)
    assert tokenizer is None or isinstance(tokenizer, HFTokenizer | ByteTokenizer)
    return model.config, model.params, tokenizer
