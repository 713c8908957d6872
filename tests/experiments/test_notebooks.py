"""The notebook of surgery, executed on a very small model; its outputs are stripped."""

import os
import sys
from pathlib import Path

import jax
import pytest

from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, init_params
from sparsejax.convert import load_run, save_run

NOTEBOOK = Path(__file__).resolve().parents[2] / "experiments" / "notebooks" / "surgery.ipynb"


@pytest.fixture(scope="module")
def notebook():
    import nbformat

    return nbformat.read(NOTEBOOK, as_version=4)


def test_outputs_are_stripped(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


def test_it_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
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
    small = f"folder, out = {str(tmp_path / 'model')!r}, {str(tmp_path / 'out')!r}"
    parameters.source += f"\n{small}\nbatch_size, seq_len, num_batches, remove = 2, 16, 1, 1.0\n"
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
    assert "attention removed from layers [0, 1, 2, 3]" in printed
    assert "widths: [128]" in printed
    assert "--layer-map 3" in printed
    pictures = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 2
    fused, params, _ = load_run(tmp_path / "out")
    assert fused.num_layers == 1 and params["layer_0"]["ffn"]["up"].shape == (128, 16)
