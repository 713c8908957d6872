"""A model small enough to compile in seconds, and the runs that several tests look at."""

import pytest

from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, RopeConfig
from sparsejax.training import activity, loop


@pytest.fixture(scope="session")
def micro() -> ModelConfig:
    """2 layers, d 32, 4 heads over 4 key/value heads, d_ff 64, byte vocabulary."""
    attention = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=8)
    layer = LayerConfig(attention=attention, ffn=FFNConfig(d_ff=64))
    return ModelConfig(
        vocab_size=272,
        d_model=32,
        layers=(layer, layer),
        context_length=32,
        rope=RopeConfig(theta=1e4),
        init_std=0.1,
        dtype="float32",
    )


@pytest.fixture(scope="session")
def micro_file(micro, tmp_path_factory) -> str:
    """The same model as a file that --preset takes."""
    path = tmp_path_factory.mktemp("presets") / "micro.json"
    path.write_text(micro.to_json())
    return str(path)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Runs within a test draw none; those of a module's fixtures, set up before, draw theirs."""
    monkeypatch.setattr(loop, "plot_run", lambda *_: [])
    monkeypatch.setattr(activity, "plot_activations", lambda *_: None)
