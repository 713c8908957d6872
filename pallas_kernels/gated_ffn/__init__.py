"""The feed-forward op: `gated_ffn`, its result type, its engines and their launch settings."""

from pallas_kernels.gated_ffn.api import gated_ffn
from pallas_kernels.gated_ffn.config import FFNConfig
from pallas_kernels.gated_ffn.output import ACTIVATIONS, FFNOutput

__all__ = ["ACTIVATIONS", "FFNConfig", "FFNOutput", "gated_ffn"]
