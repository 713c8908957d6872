"""The notebook of surgery, executed on a very small model; its outputs are stripped."""

import os
import shlex
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, init_params
from sparsejax.convert import load_run, save_run

NOTEBOOK = Path(__file__).resolve().parents[2] / "experiments" / "notebooks" / "surgery.ipynb"


@pytest.fixture
def notebook():
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)


def test_outputs_are_stripped(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


@pytest.mark.parametrize(
    ("remove", "layers", "fused"),
    [
        # Without three of four attentions two layers that follow each other have none.
        (None, (2, 3), True),
        (0.25, (4,), False),
    ],
)
def test_it_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch, remove, layers, fused):
    from nbclient import NotebookClient

    layer = LayerConfig(
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
        ffn=FFNConfig(d_ff=32),
    )
    config = ModelConfig(
        vocab_size=272, d_model=16, layers=(layer,) * 4, context_length=64, dtype="float32"
    )
    save_run(tmp_path / "model", config, init_params(config, jax.random.key(0)))
    (parameters,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    # As a user names them: relative to the notebook's folder, where its kernel runs.
    model, out = (os.path.relpath(tmp_path / name, NOTEBOOK.parent) for name in ("model", "out"))
    parameters.source += f"\nfolder, out = {model!r}, {out!r}\n"
    parameters.source += "batch_size, seq_len, num_batches = 2, 16, 1\n"
    parameters.source += "" if remove is None else f"remove = {remove}\n"
    # The kernel is this interpreter, with one device, and leaves no files at home.
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "").replace("=8", "=1"))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[2]))
    client = NotebookClient(notebook, timeout=200, kernel_name="python3")
    client.km = client.create_kernel_manager()
    client.km.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.execute(cwd=str(NOTEBOOK.parent))

    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    pictures = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2
    assert ("fused: nothing to fuse: raise `remove`" in printed) != fused
    found, params, _ = load_run(tmp_path / "out")
    assert found.num_layers in layers
    widths = [layer.ffn.d_ff for layer in found.layers]
    assert sum(widths) == 4 * 32 and (max(widths) > 32) == fused
    assert f"widths: {widths}" in printed
    assert [params[f"layer_{i}"]["ffn"]["up"].shape[0] for i in range(len(widths))] == widths
    # The command it prints can be run from any folder.
    command = next(line for line in printed.splitlines() if line.startswith("python "))
    _, script, *flags = shlex.split(command)
    assert Path(script) == NOTEBOOK.parents[1] / "distill.py" and Path(script).is_file()
    last = np.cumsum(widths) // 32 - 1  # of each group
    want = ["--teacher", str(tmp_path / "model"), "--student", str(tmp_path / "out")]
    assert flags == [*want, "--layer-map", *map(str, last)]
