"""What an update minimises, besides the sparsity term: an `Objective`.

The training step, its evaluation and the loop around them know an objective only by this protocol.
`LanguageModel` is the one of experiments/train.py; `sparsejax.distill` brings others.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from sparsejax import fused_loss
from sparsejax.config import ModelConfig
from sparsejax.losses import cross_entropy
from sparsejax.model import FFNStats, ModelOutput, Options, forward, head_weight
from sparsejax.types import Params

Batch = dict[str, Array]
Terms = dict[str, Array]


class Objective(Protocol):
    """A loss of the parameters on a batch, with arrays that no update changes beside it.

    Attributes:
      frozen: a pytree of arrays on the run's mesh (a teacher's parameters), or None. It is an
        argument of the compiled step, not a constant in it.
    """

    @property
    def frozen(self) -> Any:
        """See the class."""
        ...

    def loss(
        self, params: Params, frozen: Any, batch: Batch, weights: Array, options: Options
    ) -> tuple[Array, Terms, FFNStats]:
        """Sum over tokens of weights x something, its parts for the log, and activity.

        Args:
          params: differentiated.
          frozen: `self.frozen`, as the step's argument.
          batch: a microbatch.
          weights: (B, T) float32, mask / unmasked tokens of the whole batch: sums over microbatches
            are means.
          options: how forward passes run.
        """
        ...

    def evaluate(
        self, params: Params, frozen: Any, batch: Batch, out: ModelOutput, mask: Array
    ) -> Terms:
        """Further sums over unmasked tokens on held-out text, {"name_sum": ()}."""
        ...

    def trains(self, path: str) -> bool:
        """Whether updates may change the parameter at this path."""
        ...

    def describe(self) -> dict[str, Any]:
        """What config.json and checkpoints say of it, as JSON values."""
        ...


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Mean cross-entropy of the next token.

    Attributes:
      config: the model.
      vocab_chunk: vocabulary entries whose logits exist at a time.
      batch_ways: devices that a batch's rows are spread over.
    """

    config: ModelConfig
    vocab_chunk: int
    batch_ways: int

    frozen = None

    def loss(
        self, params: Params, frozen: None, batch: Batch, weights: Array, options: Options
    ) -> tuple[Array, Terms, FFNStats]:
        """See `Objective.loss`; the one term is "ce"."""
        out = run_model(self.config, params, batch, options)
        head, targets = head_weight(self.config, params), batch["targets"]
        rows, length = targets.shape[0] // self.batch_ways, targets.shape[1]
        if fused_loss.pays(rows, length, self.config.vocab_size, self.vocab_chunk):
            ce = fused_loss.weighted_cross_entropy(
                out.hidden, head, targets, weights, chunk=self.vocab_chunk
            )
        else:
            per_token = cross_entropy(out.hidden, head, targets, chunk=self.vocab_chunk)
            ce = jnp.sum(jnp.where(weights > 0, per_token * weights, 0.0))
        return ce, {"ce": ce}, out.stats

    def evaluate(
        self, params: Params, frozen: None, batch: Batch, out: ModelOutput, mask: Array
    ) -> Terms:
        """Nothing beyond the cross-entropy, which every evaluation has."""
        return {}

    def trains(self, path: str) -> bool:
        """All parameters."""
        return True

    def describe(self) -> dict[str, Any]:
        """The default needs no mention."""
        return {}


def run_model(config: ModelConfig, params: Params, batch: Batch, options: Options) -> ModelOutput:
    """`forward` on a batch's tokens, positions and segments."""
    return forward(
        config,
        params,
        batch["tokens"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        options=options,
    )
