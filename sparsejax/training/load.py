"""A trained model out of a run's folder, for generation, analysis and surgery."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from sparsejax.config import ModelConfig
from sparsejax.params import param_shapes
from sparsejax.sharding import make_mesh, tree_shardings
from sparsejax.training.checkpoint import Checkpointer
from sparsejax.training.workdir import Workdir
from sparsejax.types import Params


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """What a run has trained.

    Attributes:
      config: the model.
      params: its parameters, as they were saved.
      step: updates they have seen.
      data: the corpus, as `sparsejax.data.open_source` and `open_tokenizer` take it.
    """

    config: ModelConfig
    params: Params
    step: int
    data: str


def load_model(
    workdir: str | os.PathLike, *, step: int | None = None, mesh: Mesh | None = None
) -> LoadedModel:
    """The model of the newest whole checkpoint of a run; the optimiser's state is not read.

    Args:
      workdir: the run's folder.
      step: take this checkpoint and no other.
      mesh: where the parameters go, by `sparsejax.sharding.RULES`; None takes the first device.

    Raises:
      FileNotFoundError: no such run, or no such or no whole checkpoint.
      ValueError: the mesh does not fit the model.
    """
    folder = Workdir(Path(workdir))
    if not folder.checkpoints.is_dir():
        raise FileNotFoundError(
            f"{folder.root} holds no run (it has no {folder.checkpoints.name}/); give the "
            "--workdir of a run of experiments/train.py"
        )
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    with Checkpointer(folder.checkpoints) as checkpointer:
        config = ModelConfig.from_dict(checkpointer.read_extra(step)["config"])
        shapes = param_shapes(config)
        template = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            tree_shardings(mesh, shapes),
        )
        restored = checkpointer.restore_params(template, step=step)
    return LoadedModel(config, restored.state, restored.step, restored.extra["data"]["name"])
