"""Held-out cross-entropy and activity over a loader's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sparsejax.data import Batch, TokenSource
from sparsejax.sharding import batch_sharding
from sparsejax.types import Params


def to_device(mesh: Mesh, batch: Batch) -> dict[str, jax.Array]:
    """This process's rows of a global batch, placed over data and fsdp."""
    sharding = batch_sharding(mesh)
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}


def process_block(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """Which of how many equal blocks of rows this process feeds: (index, count).

    Processes that differ only along the tensor axis feed the same rows.

    Raises:
      ValueError: the process's rows are not one block (the mesh interleaves processes).
    """
    rows = batch_sharding(mesh).addressable_devices_indices_map((batch_size, 1)).values()
    spans = {
        (index[0].start or 0, batch_size if index[0].stop is None else index[0].stop)
        for index in rows
        if index is not None
    }
    start, stop = min(s for s, _ in spans), max(e for _, e in spans)
    size = sum(e - s for s, e in spans)
    if stop - start != size or batch_size % size or start % size:
        raise ValueError(
            f"this process's devices hold rows {sorted(spans)} of a batch of {batch_size}, which "
            "is not one block; order the mesh's devices by process along data and fsdp"
        )
    return start // size, batch_size // size


def evaluate(
    eval_step: Callable[[Params, Any], dict[str, jax.Array]],
    params: Params,
    mesh: Mesh,
    batches: Iterable[Batch],
    source: TokenSource,
) -> dict[str, Any]:
    """Mean cross-entropy (nats per token), bits per byte and nnz per layer over `batches`.

    `sparse_per_layer` is the share of batches on which a layer took the sparse path. Further sums
    of an objective, {"name_sum": ()}, give further means per token.
    """
    names = ("ce_sum", "tokens", "nnz_sum", "sparse_sum", "batches")
    total: dict[str, Any] = dict.fromkeys(names, 0.0)
    for batch in batches:
        # Fetching each batch's sums keeps one batch in flight and adds in float64.
        sums = jax.device_get(eval_step(params, to_device(mesh, batch)))
        total |= {k: total.get(k, 0.0) + np.asarray(v, np.float64) for k, v in sums.items()}
    # Without a single target the means are 0, and "tokens" says so.
    tokens = max(float(total["tokens"]), 1.0)
    ce = float(total["ce_sum"]) / tokens
    per_layer = np.atleast_1d(total["nnz_sum"] / tokens)
    sparse = np.atleast_1d(total["sparse_sum"] / max(float(total["batches"]), 1.0))
    further = {k: float(v) / tokens for k, v in total.items() if k not in names}
    return {
        "ce": ce,
        **{k.removesuffix("_sum"): v for k, v in further.items()},
        "bits_per_byte": source.bits_per_byte(ce),
        "tokens": int(total["tokens"]),
        "nnz": float(per_layer.mean()) if per_layer.size else 0.0,
        "nnz_per_layer": per_layer.tolist(),
        "sparse_per_layer": sparse.tolist(),
    }
