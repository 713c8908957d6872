"""Analyses of a model: what depends on what, what each part is worth, and what it costs."""

from sparsejax.analysis.dependency import Dependency, block_dependency

__all__ = [
    "Dependency",
    "block_dependency",
]
