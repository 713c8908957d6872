"""Language modelling with the L1 term inside, its coefficient an argument of the step.

`LossConfig.l1_coeff` is a constant of the compiled step, so every value of a sweep would compile a
program of its own. An objective's frozen arrays are arguments: with the coefficient there, and 0 in
`LossConfig`, all values run the same program, which jax's compilation cache keeps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax.model import FFNStats, Options
from sparsejax.training.objective import Batch, LanguageModel, Terms
from sparsejax.training.run import Run
from sparsejax.training.step import language_model
from sparsejax.types import Params


@dataclasses.dataclass(frozen=True)
class PenalisedLanguageModel(LanguageModel):
    """Cross-entropy + frozen * mean over layers and tokens of sum_n |h_n|.

    Without accumulation, and for batches whose tokens all count in the mean of the L1 term, as
    `sparsejax.training.step` has it.

    Attributes:
      l1_coeff: the coefficient's value, for the record.
      frozen: the coefficient, () float32 on the run's mesh.
    """

    l1_coeff: float
    frozen: Any = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def loss(
        self, params: Params, frozen: Any, batch: Batch, weights: Array, options: Options
    ) -> tuple[Array, Terms, FFNStats]:
        """See `Objective.loss`; the one term is "ce"."""
        ce, terms, stats = super().loss(params, None, batch, weights, options)
        layers = max(len(self.config.ffn_layers), 1)
        return ce + frozen * jnp.sum(stats.l1) / (weights.size * layers), terms, stats

    def describe(self) -> dict[str, Any]:
        """The coefficient."""
        return {"l1_coeff": self.l1_coeff}


def penalised(run: Run, l1_coeff: float) -> PenalisedLanguageModel:
    """The objective of a run whose own `l1_coeff` is 0.

    Raises:
      ValueError: the run has a coefficient of its own, or accumulates.
    """
    loss = run.config.loss
    if loss.l1_coeff != 0 or loss.accumulate != 1:
        raise ValueError(
            "penalised: the run's own l1_coeff must be 0 and accumulate 1, got "
            f"{loss.l1_coeff} and {loss.accumulate}"
        )
    plain = language_model(run.model, loss, run.mesh)
    value = jax.device_put(jnp.float32(l1_coeff), NamedSharding(run.mesh, PartitionSpec()))
    return PenalisedLanguageModel(
        plain.config, plain.vocab_chunk, plain.batch_ways, l1_coeff, value
    )
