"""What a call of the `"triton"` engine costs after its gate projection, sparse and dense.

Times on one H200 (bf16, notes_ffn.md), scaled by shape. The device prices a sample of each call
with them (pallas_triton_plan.py); `call_times` prices known counts the same way, on the host.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.gated_ffn.config import FFNConfig

LEVELS = (10, 14, 20, 28, 40, 56, 80, 112)
"""Shares of the tokens above which a neuron may count as hot, in 1/256."""
HOT_GAIN = 0.95
"""The hot way is taken where it costs less than this share of the plain sparse way."""
TAIL_PRICE = 1.2
"""A row that is not worth walking goes to the tail, at so many times the dense price."""
CHOICE_FORWARD, CHOICE_BACKWARD = 40e3, 20e3
"""Nanoseconds that a call pays for having a choice, in each pass; none under `choose_tokens`.

Forward, by the profiler: 13 us of planning, 15 to 25 of graph conditional, and 6 more of kernels
than the dense form (16,384 x 2048 x 2816, one H200, jax 0.11.2, bf16): 34 to 44; at 1024 x 2816
calls that turned dense lost 35 to 70 in all. Backward: a second conditional, 20.
"""


class Costs(NamedTuple):
    """Nanoseconds on a full chip.

    Attributes:
      entry: one active neuron of one token, everything that follows the gate projection.
      row: one token that is walked, before its entries.
      dense_row: the same work for one token in the dense engine.
      hot_row: one token's share of the small dense layer of hot neurons.
      fixed: what the sparse path costs whatever its size.
    """

    entry: float
    row: float
    dense_row: float
    hot_row: float
    fixed: float


def costs(width: int, features: int, *, training: bool) -> Costs:
    """Forward alone: two dense matmuls of a token 64 ns, a walked entry 0.88, lists and row 9.

    With the backward pass: six more dense matmuls 204 ns, three more passes over the entries 2.6.
    All at D = 2048, F = 5632, bf16.
    """
    wide, tall = width / 2048, features / 5632
    forward = Costs(0.88 * wide, 4.5 * wide + 4.5 * tall, 64 * wide * tall, 6.5 * wide, 25e3)
    if not training:
        return forward
    backward = Costs(2.6 * wide, 6 * wide + 1 * tall, 204 * wide * tall, 15 * wide, 80e3)
    return Costs(*(a + b for a, b in zip(forward, backward, strict=True)))


def row_cost(cost: Costs, entries: Any, xp: Any) -> Any:
    """min(entries * entry, 1.2 * dense_row) of each row; `xp` is numpy or jax.numpy."""
    return xp.minimum(entries * cost.entry, TAIL_PRICE * cost.dense_row)


def most_hot(features: int, config: FFNConfig) -> int:
    """Most neurons that may count as hot."""
    return max(16, min(config.hot_neurons, features // 4) // 16 * 16)


class CallTimes(NamedTuple):
    """Nanoseconds of one call after the gate projection, the choice not included.

    Attributes:
      dense: in the dense engine.
      walked: by lists and walk, long rows in the tail.
      hot: the same with the hottest neurons apart; infinite where none is hot.
    """

    dense: float
    walked: float
    hot: float

    @property
    def sparse(self) -> float:
        """The sparse way that the device takes."""
        return self.hot if self.hot < HOT_GAIN * self.walked else self.walked


def call_times(
    histogram: np.ndarray,
    fired: np.ndarray,
    *,
    tokens: int,
    width: int,
    config: FFNConfig,
    training: bool,
) -> CallTimes:
    """What the device's plan expects of a call of so many tokens with these counts as its sample.

        walked = tokens (mean over n of min(n entry, 1.2 dense_row) + row) + fixed
        hot    = the same of n times the share of firings that are not of hot neurons, + hot_row

    Args:
      histogram: (F + 1,) tokens with n active neurons, of any number of tokens.
      fired: (F,) tokens on which each neuron fires, of the same.
      tokens: of the call.
      width: D.
      config: the engine's.
      training: with the backward pass.
    """
    features, sampled = len(fired), int(histogram.sum())
    cost = costs(width, features, training=training)
    number = np.arange(features + 1)

    def walked(share: float) -> float:
        mean = float(histogram @ row_cost(cost, number * share, np)) / sampled
        return tokens * (mean + cost.row) + cost.fixed

    hot = math.inf
    if config.choice == "auto" and tokens >= config.choose_tokens:
        # The lowest level whose neurons fit.
        sets = (fired[256 * fired > level * sampled] for level in LEVELS)
        found = next((s for s in sets if len(s) <= most_hot(features, config)), fired[:0])
        if len(found):
            hot = walked(1 - int(found.sum()) / int(fired.sum())) + tokens * cost.hot_row
    return CallTimes(tokens * cost.dense_row, walked(1.0), hot)
