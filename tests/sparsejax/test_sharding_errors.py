"""What is said of a mesh that does not fit: what the size counts, once, and what would fit."""

import pytest

from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.params import param_shapes
from sparsejax.sharding import MeshConfig, make_mesh, tree_shardings
from sparsejax.sharding_errors import Split, misfit


def model(layers):
    attention = AttentionConfig(num_heads=12, num_kv_heads=6, head_dim=8)
    layer = LayerConfig(attention=attention, ffn=FFNConfig(d_ff=96))
    return ModelConfig(vocab_size=96, d_model=32, layers=(layer,) * layers)


def test_kv_heads_are_named_once_with_the_fix():
    with pytest.raises(ValueError, match="the mesh does not fit") as caught:
        tree_shardings(make_mesh(MeshConfig(2, 1, 4)), param_shapes(model(layers=24)))
    assert str(caught.value).splitlines() == [
        "the mesh does not fit the model:",
        "  KV heads: layer_0/attn/k: dimension 1 of size 6 does not divide over 'tensor' = 4 "
        "devices, and 47 more like it",
        "--mesh.tensor must divide 6 for this model; the other devices can go to --mesh.fsdp",
    ]
    # What it says is so.
    tree_shardings(make_mesh(MeshConfig(4, 1, 2)), param_shapes(model(layers=24)))


def test_different_sizes_and_axes_have_their_own_lines():
    splits = [
        Split("layer_0/ffn/up", 0, 96, "tensor", 8),
        Split("layer_0/ffn/up", 1, 30, "fsdp", 4),
        Split("layer_0/ffn/down", 1, 30, "fsdp", 4),
        Split("layer_1/ffn/up", 0, 100, "tensor", 8),
        Split("layer_2/ffn/up", 0, 60, "tensor", 8),
    ]
    assert misfit(splits).splitlines()[1:] == [
        "  layer_0/ffn/up: dimension 1 of size 30 does not divide over 'fsdp' = 4 devices",
        "  layer_0/ffn/down: dimension 1 of size 30 does not divide over 'fsdp' = 4 devices",
        "  neurons: layer_1/ffn/up: dimension 0 of size 100 does not divide over 'tensor' = 8 "
        "devices",
        "  neurons: layer_2/ffn/up: dimension 0 of size 60 does not divide over 'tensor' = 8 "
        "devices",
        "--mesh.tensor must divide 4 for this model; the other devices can go to --mesh.fsdp",
        "--mesh.fsdp must divide 30 for this model; the other devices can go to --mesh.data",
    ]
    assert misfit(splits[:1]) == ""
