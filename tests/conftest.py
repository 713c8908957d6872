"""Test settings: 8 host devices, strict dtype promotion, GPU tests skipped with a reason."""

import os

# Before jax is imported anywhere: eight devices on the host stand in for eight GPUs. Programs run
# for milliseconds here and compile for seconds: less optimisation halves the suite's time.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device, found {jax.default_backend()!r}")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
