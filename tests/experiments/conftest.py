"""The study scripts run in this process, one after the other in one folder: they share runs."""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro

from sparsejax import make_mesh
from sparsejax.data import ByteTokenizer, sources
from sparsejax.data import stdlib as stdlib_module
from sparsejax.studies import sweep
from sparsejax.training import activity, loop, run

SCRIPTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture(scope="session")
def study_results(tmp_path_factory):
    """Where all studies write."""
    return tmp_path_factory.mktemp("studies")


@pytest.fixture
def run_study(study_results, monkeypatch):
    """`run_study(name, *flags)`: `experiments/study_{name}.py --smoke`, on a short text."""
    words = np.random.default_rng(0).integers(0, 256, (2, 4000)).astype(np.uint16)

    def short_text(split: str):
        return sources.array_source(
            words[int(split == "val")], tokenizer=ByteTokenizer(), name="words", split=split
        )

    monkeypatch.setattr(stdlib_module, "open_stdlib", short_text)
    # Programs for eight devices compile several times as long.
    monkeypatch.setattr(run, "make_mesh", lambda _: make_mesh(devices=jax.devices()[:1]))
    # Pictures of single runs are tested where they are made.
    monkeypatch.setattr(loop, "plot_run", lambda *_: [])
    monkeypatch.setattr(activity, "plot_activations", lambda *_: None)
    sweep.source_facts.cache_clear()

    def call(name: str, *flags: str) -> Path:
        path = SCRIPTS / f"study_{name}.py"
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        args = tyro.cli(module.Args, args=["--smoke", "--results", str(study_results), *flags])
        assert module.main(args) == 0
        return study_results

    yield call
    sweep.source_facts.cache_clear()
