"""`pack_matmul`: a matmul whose result is written as a sparse matrix."""

from pallas_kernels.pack_matmul.api import pack_matmul
from pallas_kernels.pack_matmul.config import PackConfig

__all__ = ["PackConfig", "pack_matmul"]
