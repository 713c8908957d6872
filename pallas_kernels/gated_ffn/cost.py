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
      again_row: projecting gate and up once more in the backward pass, which a dense call does
        where residuals are compact.
      hot_row: one token's share of the small dense layer of hot neurons.
      fixed: what the sparse path costs whatever its size.
    """

    entry: float
    row: float
    dense_row: float
    again_row: float
    hot_row: float
    fixed: float

    def dense_call(self, config: FFNConfig, *, training: bool) -> float:
        """One token of a call of the sparse engine that turns dense."""
        again = training and config.residuals == "compact"
        return self.dense_row + (self.again_row if again else 0.0)


def costs(width: int, features: int, *, training: bool) -> Costs:
    """Forward alone: two dense matmuls of a token 62 ns and the pass between them 8, a walked
    entry 0.92, lists and row 9.

    With the backward pass: six more dense matmuls 204 ns and a pass 8, three more passes over the
    entries 2.56; projecting again 81. All at D = 2048, F = 5632, bf16, from one run's calls at 15,
    30, 60 and 120 active neurons (notes_ffn.md, v9).
    """
    wide, tall = width / 2048, features / 5632
    both = wide * tall
    forward = Costs(
        entry=0.92 * wide,
        row=4.5 * wide + 4.5 * tall,
        dense_row=62 * both + 8 * tall,
        again_row=0.0,
        hot_row=6.5 * wide,
        fixed=25e3,
    )
    if not training:
        return forward
    backward = Costs(
        entry=2.56 * wide,
        row=6 * wide + 1 * tall,
        dense_row=204 * both + 8 * tall,
        again_row=81 * both,
        hot_row=15 * wide,
        fixed=80e3,
    )
    return Costs(*(a + b for a, b in zip(forward, backward, strict=True)))


def row_cost(cost: Costs, entries: Any, xp: Any) -> Any:
    """min(entries * entry, 1.2 * (dense_row + again_row)) of each row; `xp` is numpy or jax.numpy.

    A row of the tail is projected again in the backward pass, whatever residuals are.
    """
    return xp.minimum(entries * cost.entry, TAIL_PRICE * (cost.dense_row + cost.again_row))


def most_hot(features: int, config: FFNConfig) -> int:
    """Most neurons that may count as hot."""
    return max(16, min(config.hot_neurons, features // 4) // 16 * 16)


class CallTimes(NamedTuple):
    """Nanoseconds of one call after the gate projection, the choice not included.

    Attributes:
      dense: where it turns dense (the dense engine's own, too, but for compact residuals).
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

        walked = tokens (mean over n of min(n entry, 1.2 (dense_row + again_row)) + row) + fixed
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
    dense = cost.dense_call(config, training=training)
    return CallTimes(tokens * dense, walked(1.0), hot)
