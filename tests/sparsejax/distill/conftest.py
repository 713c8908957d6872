"""A teacher and a student made of it, small enough to compile in seconds."""

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
    surgery,
)
from sparsejax.convert import save_run
from sparsejax.training import activity, loop, run


@pytest.fixture(scope="session")
def whole():
    """3 layers, d 16, byte vocabulary: (config, params)."""
    attention = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    config = ModelConfig(
        vocab_size=272,
        d_model=16,
        layers=(LayerConfig(attention=attention, ffn=FFNConfig(d_ff=32)),) * 3,
        context_length=32,
        rope=RopeConfig(theta=1e4),
        init_std=0.2,
        dtype="float32",
    )
    return config, init_params(config, jax.random.key(0))


@pytest.fixture(scope="session")
def cut(whole):
    """Attention of layers 0 and 1 removed, both fused: 2 layers, which stand for 1 and 2."""
    return surgery.fuse_ffns(*surgery.remove_attention(*whole, [0, 1]), [(0, 1)])


@pytest.fixture(scope="session")
def folders(whole, cut, tmp_path_factory):
    """Run folders of both: (teacher, student)."""
    root = tmp_path_factory.mktemp("models")
    save_run(root / "teacher", *whole)
    save_run(root / "student", *cut)
    return root / "teacher", root / "student"


@pytest.fixture(scope="module")
def one_device():
    """Runs take one of the eight devices: programs for eight compile several times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_mesh", lambda _: make_mesh(devices=jax.devices()[:1]))
        yield


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Runs within a test draw none; those of a module's fixtures, set up before, draw theirs."""
    monkeypatch.setattr(loop, "plot_run", lambda *_: [])
    monkeypatch.setattr(activity, "plot_activations", lambda *_: None)
