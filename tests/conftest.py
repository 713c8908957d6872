"""Test settings: 8 host devices, strict dtype promotion, GPU tests skipped with a reason."""

import os
from pathlib import Path

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


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory, request) -> Path:
    """The compiled programs of this session alone: runs that repeat, in all its workers, share
    them. They still trace and lower; processes that tests start compile for themselves, unless
    the test hands them this folder."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if hasattr(request.config, "workerinput") else folder) / "programs"
    if jax.default_backend() == "cpu":
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device, found {jax.default_backend()!r}")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
