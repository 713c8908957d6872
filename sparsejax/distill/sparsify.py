"""A dense model made sparse: ReLU in the place of its activation, then training with L1."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import tyro

from sparsejax.config import ModelConfig
from sparsejax.distill.config import MaybeTaught
from sparsejax.surgery import relufy
from sparsejax.training.loop import train
from sparsejax.training.optimizer import OptimizerConfig
from sparsejax.types import Params

_flat = tyro.conf.arg(name="")


@dataclasses.dataclass(frozen=True)
class RelufyConfig(MaybeTaught):
    """Continued training of a dense model with ReLU and L1.

    The sparsity term and its schedule are those of every run: --l1-coeff, --l1-start, --l1-ramp.
    A teacher, usually the dense model itself, is optional.

    Attributes:
      threshold: t in relu(z - t); becomes part of the gate biases, which training may move.
      relu_layers: layers whose activation is replaced; None takes all that are not ReLU.
      optimizer: AdamW and its schedule.
    """

    threshold: float = 0.0
    relu_layers: tuple[int, ...] | None = None
    optimizer: Annotated[OptimizerConfig, _flat] = OptimizerConfig(learning_rate=1e-4)

    def __post_init__(self):
        super().__post_init__()
        if self.init_from is None:
            raise ValueError("name the folder of the dense model to start from (--init-from)")
        if self.relu_layers is not None and not self.relu_layers:
            raise ValueError(
                "relu_layers is empty, and no activation would be replaced: name layers, or leave "
                "--relu-layers out to replace all that are not ReLU"
            )

    def change_init(self, config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
        """ReLU in the place of the model's activation; see `sparsejax.surgery.relufy`."""
        return relufy(config, params, self.relu_layers, threshold=self.threshold)[:2]


def sparsify(config: RelufyConfig) -> dict[str, Any]:
    """Replaces the activation and trains; as `sparsejax.training.loop.train`, which it is."""
    return train(config, config.objective)
