"""Pallas kernels for sparse feed-forward layers; knows jax only."""

from pallas_kernels.dispatch import UnsupportedError, interpret
from pallas_kernels.gated_ffn import FFNConfig, FFNOutput, gated_ffn
from pallas_kernels.pack_matmul import PackConfig, pack_matmul
from pallas_kernels.twell import RowList, TwELL

__all__ = [
    "FFNConfig",
    "FFNOutput",
    "PackConfig",
    "RowList",
    "TwELL",
    "UnsupportedError",
    "gated_ffn",
    "interpret",
    "pack_matmul",
]
