"""A model of four layers whose second and third attention hardly matter."""

import jax
import pytest

from sparsejax import (
    AttentionConfig,
    FFNConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    init_params,
    make_mesh,
)
from sparsejax.convert import save_run
from sparsejax.training import run


@pytest.fixture(scope="session")
def model():
    """(config, params); layers 1 and 2 have weak attention."""
    attention = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    config = ModelConfig(
        vocab_size=272,
        d_model=16,
        layers=(LayerConfig(attention=attention, ffn=FFNConfig(d_ff=32)),) * 4,
        context_length=64,
        rope=RopeConfig(theta=1e4),
        init_std=0.2,
        dtype="float32",
    )
    params = init_params(config, jax.random.key(0))
    for i in (1, 2):
        attn = params[f"layer_{i}"]["attn"]
        params[f"layer_{i}"]["attn"] = attn | {"o": 0.01 * attn["o"]}
    return config, params


@pytest.fixture(scope="session")
def source(model, tmp_path_factory):
    """Its run folder."""
    path = tmp_path_factory.mktemp("source") / "run"
    save_run(path, *model)
    return path


@pytest.fixture(scope="module")
def one_device():
    """Runs take one of the eight devices: programs for eight compile several times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_mesh", lambda _: make_mesh(devices=jax.devices()[:1]))
        yield
