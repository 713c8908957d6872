"""Full-block parallelisation: neighbouring layers, attention and all, read the same input."""

from __future__ import annotations

import dataclasses

from sparsejax.config import ModelConfig
from sparsejax.surgery.common import Runs, check_runs, put_together, take_apart
from sparsejax.types import Params


def parallelize_blocks(
    config: ModelConfig, params: Params, windows: Runs
) -> tuple[ModelConfig, Params]:
    """y = x + sum_k (layer_k(x) - x) for the layers k of each window, all reading the same x.

    Every layer of a window but the first gets `parallel_with_previous`; no array changes, and no
    layer changes its number. A layer that was parallel with a neighbour stays so: a window that
    touches such a run joins it. Unlike feed-forward layers alone (`fuse_ffns`), whole layers do not
    become one: each attention feeds its own feed-forward part.

    Args:
      config: the model.
      params: its parameters.
      windows: runs of consecutive layers, such as [range(38, 42)].

    Returns:
      (config, params).

    Raises:
      ValueError: unknown or non-consecutive layers, a window of one, or windows that overlap.

    Source: FFN Fusion, arXiv 2503.18908, section on block parallelisation.
    """
    inner = {
        i
        for window in check_runs("parallelize_blocks", "windows", config, windows)
        for i in window[1:]
    }
    return put_together(
        config,
        params,
        (
            (dataclasses.replace(layer, parallel_with_previous=True) if i in inner else layer, part)
            for i, (layer, part) in enumerate(take_apart(config, params))
        ),
    )
