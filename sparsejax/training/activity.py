"""The activation statistics of a finished run on held-out text."""

from __future__ import annotations

import itertools
from typing import Any

import jax

from sparsejax.analysis.activation_plot import plot_activations
from sparsejax.analysis.activations import activation_stats
from sparsejax.training.evaluate import to_device
from sparsejax.training.run import Run
from sparsejax.types import Params


def report_activity(run: Run, params: Params) -> list[dict[str, Any]]:
    """Writes activations.json and plots/activations.png; returns a row per ReLU layer.

    The batches are those of an evaluation. Without held-out text or ReLU layers nothing is written.
    """
    if run.val_source is None or not run.model.sparse_layers:
        return []
    with run.loader(
        run.val_source, num_epochs=1, shuffle=False, drop_remainder=False, worker_count=0
    ) as loader:
        batches = itertools.islice(loader, run.config.eval_batches)
        stats = activation_stats(run.model, params, (to_device(run.mesh, b) for b in batches))
    if jax.process_index() == 0:
        stats.to_json(run.workdir.root / "activations.json")
        run.workdir.plots.mkdir(parents=True, exist_ok=True)
        plot_activations(stats, run.workdir.plots / "activations.png")
    return stats.summary()
