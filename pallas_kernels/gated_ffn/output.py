"""What the feed-forward op returns, and the activations it knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
from jax import Array

# Only "relu" makes exact zeros; the others exist on the dense path alone.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FFNOutput:
    """Result of `gated_ffn`; unpacks as `y, l1, nnz = gated_ffn(...)`.

    Attributes:
      y: (..., D), dtype of x.
      l1: (...) float32, sum over neurons of |h| per token; differentiable.
      nnz: (...) int32, active neurons per token.
      neuron_nnz: (F,) int32, tokens on which each neuron is active; None unless asked for with
        `count_neurons=True`.
      sparse: () int32, 1 where this call took the sparse path and 0 where it took the dense one;
        None where the engine does not tell.
    """

    y: Array
    l1: Array
    nnz: Array
    neuron_nnz: Array | None = None
    sparse: Array | None = None

    def __iter__(self) -> Iterator[Array]:
        return iter((self.y, self.l1, self.nnz))
