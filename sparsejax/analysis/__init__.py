"""Analyses of a model: what depends on what, what each part is worth, and what it costs.

| function | what it tells |
|---|---|
| `activation_stats` | how many neurons are active, which never or rarely, and at which positions |
| `pick_engines`, `engine_estimates` | which engine each layer should have, and its time in both |
| `block_dependency` | how far each layer's contribution turns when an earlier layer is removed |
| `block_scores` | KL when one layer loses attention, its FFN, or neurons; cosines and norms |
| `fusion_groups`, `parallel_windows` | which layers to fuse or to run side by side |
| `select_architecture`, `apply_selection` | one variant per layer under limits |
| `cost.estimate`, `cost.layer_costs` | parameters, FLOPs, bytes, all-reduces and seconds |
| `plots` | heat map and lines of all that |
"""

from sparsejax.analysis import cost, plots
from sparsejax.analysis.activation_plot import plot_activations
from sparsejax.analysis.activations import ActivationStats, LayerActivations, activation_stats
from sparsejax.analysis.architecture import Selection, apply_selection, select_architecture
from sparsejax.analysis.choices import Choice, Variant
from sparsejax.analysis.dependency import Dependency, block_dependency
from sparsejax.analysis.engines import EngineEstimate, engine_estimates, pick_engines
from sparsejax.analysis.kl import kl_divergence
from sparsejax.analysis.scores import NO_ATTENTION, NO_FFN, BlockScores, block_scores
from sparsejax.analysis.selection import fusion_groups, parallel_windows

__all__ = [
    "NO_ATTENTION",
    "NO_FFN",
    "ActivationStats",
    "BlockScores",
    "Choice",
    "Dependency",
    "EngineEstimate",
    "LayerActivations",
    "Selection",
    "Variant",
    "activation_stats",
    "apply_selection",
    "block_dependency",
    "block_scores",
    "cost",
    "engine_estimates",
    "fusion_groups",
    "kl_divergence",
    "parallel_windows",
    "pick_engines",
    "plot_activations",
    "plots",
    "select_architecture",
]
