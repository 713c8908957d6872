"""Test settings: 8 host devices, strict dtype promotion, GPU tests skipped with a reason."""

import os

# Before jax is imported anywhere: eight devices on the host stand in for eight GPUs.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

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
