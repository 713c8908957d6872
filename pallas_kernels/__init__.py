"""Pallas kernels for sparse feed-forward layers; knows jax only."""

from pallas_kernels.dispatch import UnsupportedError, interpret
from pallas_kernels.gated_ffn import FFNOutput, gated_ffn

__all__ = ["FFNOutput", "UnsupportedError", "gated_ffn", "interpret"]
