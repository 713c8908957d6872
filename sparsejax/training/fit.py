"""Which residuals a training step keeps: the faster ones, where they fit into device memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sparsejax.config import ModelConfig
from sparsejax.hardware import memory_needed
from sparsejax.modules import Options

_SHARE = 0.9  # of the memory that a program may take: collectives and fragments need some, too


def has_a_choice(model: ModelConfig, options: Options) -> bool:
    """Whether `compile_fitting` may choose: nothing is asked for, and the sparse engine may run."""
    own = options.per_layer(model.num_layers)
    sparse = any(own[i].implementation != "xla" for i in model.sparse_layers)
    asked = options.residuals is not None or options.remat != "none"
    return sparse and not asked


def compile_fitting(
    lower: Callable[[Options], Any], model: ModelConfig, options: Options, limit: int | None
) -> tuple[Any, Options]:
    """The compiled step, and the options it was compiled with.

    Where `options.residuals` is None and the sparse engine may run, "full" residuals are taken if
    the program then needs at most 90 % of `limit`: a layer that is still dense trains faster with
    them, and a sparse one as fast. Otherwise, at the price of a second compilation, "compact".

    Args:
      lower: options -> the lowered step.
      model: the model.
      options: what was asked for.
      limit: bytes of one device; None leaves the options as they are.
    """
    if limit is None or not has_a_choice(model, options):
        return lower(options).compile(), options
    full = dataclasses.replace(options, residuals="full")
    compiled = lower(full).compile()
    if memory_needed(compiled)["peak"] <= _SHARE * limit:
        return compiled, full
    compact = dataclasses.replace(options, residuals="compact")
    return lower(compact).compile(), compact
