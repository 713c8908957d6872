"""The feed-forward op: `gated_ffn`, its result type and its engines."""

from pallas_kernels.gated_ffn.api import gated_ffn
from pallas_kernels.gated_ffn.output import ACTIVATIONS, FFNOutput

__all__ = ["ACTIVATIONS", "FFNOutput", "gated_ffn"]
