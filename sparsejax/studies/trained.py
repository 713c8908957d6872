"""The cases of `sparsejax.benchmark` with trained weights and real text in place of random ones."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import benchmark
from sparsejax.config import ModelConfig
from sparsejax.data import TokenSource
from sparsejax.sharding import batch_sharding
from sparsejax.studies.timing import time_variants
from sparsejax.types import Params

Mode = Literal["train", "prefill", "decode"]


def time_trained(
    mode: Mode,
    config: ModelConfig,
    trained: Params,
    source: TokenSource,
    shape: benchmark.Shape,
    *,
    engines: tuple[str | None, ...] | None = None,
    **measuring: Any,
) -> list[dict[str, Any]]:
    """Rows of `timing.time_variants`, with speed, energy and memory against the fastest dense one.

    Args:
      mode: what one call does.
      config: the model.
      trained: its parameters.
      source: the text that it reads.
      shape: what is run.
      engines: one per layer, for a fourth variant "picked", whose row names them.
      measuring: reps, calls, energy_seconds.
    """
    case = trained_case(mode, config, trained, text_for(source, mode, shape), shape)
    case.engines = engines
    if jax.default_backend() != "gpu":
        case.sparse_engine = None
        case.engines = None if engines is None else (None,) * len(engines)
    rows = time_variants(case, **measuring)
    dense = min((r for r in rows if r["variant"] in benchmark.DENSE), key=lambda r: r["ms"])
    for row in rows:
        row["ratio_to_fastest_dense"] = dense["ms"] / row["ms"]
        if row["variant"] == benchmark.PICKED:
            row["engines"] = engines
        row["peak_bytes"] = row["compiled_bytes"]["peak"]
        if row["joules_per_token"] is not None:
            row["energy_ratio"] = row["joules_per_token"] / dense["joules_per_token"]
    return rows


def text_for(source: TokenSource, mode: str, shape: benchmark.Shape) -> np.ndarray:
    """(2, B, n) int32 ids for `trained_case`, from the start; a short text goes round."""
    tokens = np.asarray(source.tokens).astype(np.int32)
    size = shape.seq_len + (shape.decode_steps if mode == "decode" else 1)
    return np.resize(tokens, 2 * shape.batch_size * size).reshape(2, shape.batch_size, size)


def trained_case(
    mode: Mode,
    config: ModelConfig,
    trained: Params,
    text: np.ndarray,
    shape: benchmark.Shape,
) -> benchmark.Case:
    """A case whose model is `config` as it is (no gate biases are added), on `text`.

    The dense SiLU variant has these very weights too, for its speed; what it computes is of no use.

    Args:
      mode: what one call does.
      config: the model.
      trained: its parameters.
      text: (2, B, T + 1) ids, for decode (2, B, T + decode_steps), T = shape.seq_len.
      shape: what is run.

    Raises:
      ValueError: text of another shape.
    """
    rows, length = shape.batch_size, shape.seq_len
    further = shape.decode_steps if mode == "decode" else 1
    if text.shape != (2, rows, length + further):
        raise ValueError(
            f"trained_case: text must have shape {[2, rows, length + further]}, got "
            f"{list(text.shape)}"
        )

    class OfText(benchmark.Case):
        """Its place is between a mode's class and `Case`."""

        def __init__(self, model: ModelConfig, nnz: Any, shape: benchmark.Shape):
            super().__init__(model, nnz, shape)
            self.model = config
            self.ids = [
                jax.device_put(np.ascontiguousarray(batch[:, : length + 1]), self._rows())
                for batch in text
            ]

        def _rows(self) -> Any:
            return batch_sharding(self.mesh)

        def calibrated(self, params: Params) -> Params:
            """Copies of the trained parameters, which training steps are given to reuse."""
            return jax.tree.map(
                lambda new, old: jax.device_put(jnp.array(new, old.dtype, copy=True), old.sharding),
                trained,
                params,
            )

    bases: Any = (benchmark.CASES[mode], OfText)
    case: Any = type("Trained", bases, {})(config, [], shape)
    if mode == "decode":
        case.fed = jax.device_put(np.ascontiguousarray(text[0][:, length:]), case._rows())
    return case
