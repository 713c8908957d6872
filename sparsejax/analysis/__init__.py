"""Analyses of a model: what depends on what, what each part is worth, and what it costs.

| function | what it tells |
|---|---|
| `activation_stats` | how many neurons are active, which never or rarely, and at which positions |
| `block_dependency` | how far each layer's contribution turns when an earlier layer is removed |
| `block_scores` | KL when one layer loses attention, its FFN, or neurons; cosines and norms |
"""

from sparsejax.analysis.activation_plot import plot_activations
from sparsejax.analysis.activations import ActivationStats, LayerActivations, activation_stats
from sparsejax.analysis.choices import Choice, Variant
from sparsejax.analysis.dependency import Dependency, block_dependency
from sparsejax.analysis.kl import kl_divergence
from sparsejax.analysis.scores import NO_ATTENTION, NO_FFN, BlockScores, block_scores

__all__ = [
    "NO_ATTENTION",
    "NO_FFN",
    "ActivationStats",
    "BlockScores",
    "Choice",
    "Dependency",
    "LayerActivations",
    "Variant",
    "activation_stats",
    "block_dependency",
    "block_scores",
    "kl_divergence",
    "plot_activations",
]
