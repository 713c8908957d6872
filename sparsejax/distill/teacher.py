"""The model that a student learns from: read once, in half precision, onto the student's mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from sparsejax.config import ModelConfig
from sparsejax.convert import load
from sparsejax.training.digest import tree_summaries
from sparsejax.training.initial import folder_kind
from sparsejax.training.load import load_model
from sparsejax.types import Params


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model.

    Attributes:
      config: the model.
      params: its parameters.
      origin: where they come from, for the record.
    """

    config: ModelConfig
    params: Params
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)


def load_teacher(path: Path, mesh: Mesh, dtype: str, *, step: int | None = None) -> Teacher:
    """The model of a run or of a Hugging Face folder, kept and computed in `dtype`.

    Args:
      path: the folder.
      mesh: where the parameters go, by `sparsejax.sharding.RULES`.
      dtype: "bfloat16" or "float32".
      step: the checkpoint of a run; None takes the newest whole one.

    Raises:
      FileNotFoundError: no model there.
      ValueError: the mesh does not fit the model, or a parameter is not finite.
    """
    if folder_kind(path) == "hf":
        if step is not None:
            raise ValueError(f"teacher {path} is a Hugging Face folder, which has no step {step}")
        config, params, _ = load(path, mesh, dtype)
    else:
        model = load_model(path, step=step, mesh=mesh)
        config, params, step = model.config, _cast(model.params, dtype), model.step
    config = config.replace(dtype=dtype, param_dtype=dtype)
    summaries = tree_summaries(params)
    if bad := [name for name, summary in summaries.items() if not summary.finite]:
        raise ValueError(
            f"teacher {path}: {', '.join(bad[:3])} {'holds' if len(bad) == 1 else 'hold'} NaN or "
            f"infinity ({len(bad)} of {len(summaries)} parameters); nothing can be learnt from it"
        )
    # Shows in the logs of a resumed run if the folder has another model by then.
    digest = format(sum(int(s.digest, 16) for s in summaries.values()) % 2**64, "016x")
    return Teacher(config, params, {"teacher": str(path), "step": step, "digest": digest})


def _cast(params: Params, dtype: str) -> Params:
    """Leaf by leaf, the old one freed: no second tree beside the first."""

    def cast(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == dtype:
            return leaf
        new = jax.block_until_ready(leaf.astype(dtype))
        leaf.delete()
        return new

    return jax.tree.map(cast, params)
