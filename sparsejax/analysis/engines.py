"""Which engine each feed-forward layer should have, from the statistics of a trained model.

The sparse engine decides in every call, from a sample, whether to run sparse or dense. Where that
is known beforehand it need not be asked: a layer that is dense anyway takes the dense engine.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from pallas_kernels.gated_ffn import config as configs
from pallas_kernels.gated_ffn import pallas_triton
from pallas_kernels.gated_ffn.cost import CHOICE_BACKWARD, CHOICE_FORWARD, call_times
from sparsejax.analysis.activations import ActivationStats, LayerActivations
from sparsejax.checks import model_config, whole_number
from sparsejax.config import FFNConfig, ModelConfig

LEAST_TOKENS = configs.FFNConfig.decode_tokens + 1
"""Calls of fewer tokens run decode kernels, of which there is no cost model."""


@dataclasses.dataclass(frozen=True)
class EngineEstimate:
    """What one ReLU layer is expected to take after its gate projection, which both engines share.

    Attributes:
      layer: its index.
      nnz: mean of active neurons per token.
      dense_us: microseconds of the dense engine.
      sparse_us: microseconds of the sparse engine running sparse, its choice included; infinite
        where it does not support the layer.
    """

    layer: int
    nnz: float
    dense_us: float
    sparse_us: float

    @property
    def engine(self) -> str:
        """The faster one, as `Options.implementation` names it: "triton" or "xla"."""
        return "triton" if self.sparse_us < self.dense_us else "xla"


def engine_estimates(
    config: ModelConfig, stats: ActivationStats, *, tokens: int, training: bool = False
) -> tuple[EngineEstimate, ...]:
    """Times of both engines for every ReLU layer, in order, by the engine's own cost model.

        dense  = tokens dense_row
        sparse = tokens (mean of min(n entry, 1.2 (dense_row + again_row)) + row) + fixed + choice

    over the tokens of `stats`, n active neurons each; where the layer's hottest neurons are cheaper
    apart, that way's price (`pallas_kernels.gated_ffn.cost`). Prices were measured in bfloat16 on
    one H200 and are scaled by shape; on another GPU they say less.

    Args:
      config: the model.
      stats: `activation_stats` of all its ReLU layers, on text like that which it will read.
      tokens: B * T of one forward pass (with accumulation, of a microbatch) on one device. Layers
        are taken whole: their neurons are not divided over `tensor`.
      training: the backward pass counts too.

    Raises:
      ValueError: a layer that `stats` does not cover or has with another number of neurons, no
        tokens counted, or 64 tokens or fewer: those run decode kernels, which have no cost model.
    """
    name = "engine_estimates"
    model_config(name, config)
    tokens = whole_number(name, "tokens", tokens)
    if tokens < LEAST_TOKENS:
        raise ValueError(
            f"{name}: tokens must be at least {LEAST_TOKENS}, got {tokens}: fewer run decode "
            "kernels, for which there is no cost model; name one engine for them"
        )
    if not isinstance(stats, ActivationStats):
        raise ValueError(
            f"{name}: stats must be what activation_stats gives, got {type(stats).__name__}"
        )
    estimates = []
    for i in config.sparse_layers:
        ffn = config.layers[i].ffn
        assert ffn is not None
        found = stats.of_layer(i)
        if found.d_ff != ffn.d_ff or not found.tokens:
            raise ValueError(
                f"{name}: stats has {found.d_ff} neurons and {found.tokens} tokens of layer {i}, "
                f"which has {ffn.d_ff} neurons; pass activation_stats of this very model"
            )
        estimates.append(_estimate(config, ffn, found, tokens, training))
    return tuple(estimates)


def pick_engines(
    config: ModelConfig, stats: ActivationStats, *, tokens: int, training: bool = False
) -> tuple[str | None, ...]:
    """The engine of every layer, for `Options(implementation=...)`; see `engine_estimates`.

    "triton" where the sparse engine, its choice included, is expected to beat the dense one, "xla"
    in other layers with a feed-forward part that may be sparse, None elsewhere. "triton" is named
    whatever machine this runs on; to run it takes a CUDA device.

    Args and errors as `engine_estimates`.
    """
    found = engine_estimates(config, stats, tokens=tokens, training=training)
    engines = {estimate.layer: estimate.engine for estimate in found}
    return tuple(engines.get(i) for i in range(config.num_layers))


def _estimate(
    config: ModelConfig, ffn: FFNConfig, found: LayerActivations, tokens: int, training: bool
) -> EngineEstimate:
    width, dtype = config.d_model, config.dtype
    # With full residuals a dense call costs what the dense engine does.
    launch = dataclasses.replace(configs.default(tokens, width, ffn.d_ff, dtype), residuals="full")
    times = call_times(
        found.histogram, found.fired, tokens=tokens, width=width, config=launch, training=training
    )
    choice = 0.0
    if tokens >= launch.choose_tokens:
        choice = CHOICE_FORWARD + (CHOICE_BACKWARD if training else 0.0)
    x, up = (jax.ShapeDtypeStruct((n, width), dtype) for n in (tokens, ffn.d_ff))
    runs = pallas_triton.unsupported_layer(x, up, ffn.activation) is None
    sparse = times.sparse + choice if runs else math.inf
    return EngineEstimate(found.layer, found.mean, times.dense / 1e3, sparse / 1e3)
