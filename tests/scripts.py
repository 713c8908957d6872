"""Scripts of experiments/ as modules of this process."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


def script_fixture(name: str):
    """A fixture, one per test module: `experiments/{name}.py`, imported but not run."""

    @pytest.fixture(scope="module")
    def script() -> Iterator[ModuleType]:
        spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module
        del sys.modules[name]

    return script
