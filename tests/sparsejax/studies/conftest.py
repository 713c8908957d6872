"""A model of four layers, of which the middle two have no attention."""

import jax
import pytest

from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, init_params, surgery


@pytest.fixture(scope="session")
def model():
    """(config, params), gated ReLU, float32."""
    layer = LayerConfig(
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8), ffn=FFNConfig(d_ff=32)
    )
    config = ModelConfig(
        vocab_size=48,
        d_model=16,
        layers=(layer,) * 4,
        context_length=16,
        init_std=0.3,
        dtype="float32",
    )
    return surgery.remove_attention(config, init_params(config, jax.random.key(0)), [1, 2])
