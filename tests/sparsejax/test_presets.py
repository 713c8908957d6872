"""Presets against the published sizes, without allocating a single parameter."""

import math
import tracemalloc

import jax
import pytest

from sparsejax import param_shapes, presets
from sparsejax.config import AttentionConfig, RopeConfig
from sparsejax.params import count


@pytest.mark.parametrize(
    ("size", "layers"), [("0.5b", 8), ("1b", 18), ("1.5b", 28), ("2b", 38)], ids=str
)
@pytest.mark.parametrize(
    ("suffix", "d_ff", "gated", "activation"),
    [
        ("", 5632, True, "relu"),
        ("-dense", 5632, True, "silu"),
        ("-nongated", 8192, False, "relu"),
    ],
)
def test_published_sizes(size, layers, suffix, d_ff, gated, activation):
    config = presets.get(size + suffix)
    assert (config.d_model, config.vocab_size, config.context_length) == (2048, 49152, 2048)
    assert config.tie_embeddings and config.rope == RopeConfig(theta=1e5)
    assert config.dtype == "bfloat16" and config.param_dtype == "float32"
    assert config.num_layers == layers and len(set(config.layers)) == 1
    layer = config.layers[0]
    assert not layer.parallel_with_previous and layer.attention and layer.ffn
    assert layer.attention == AttentionConfig(num_heads=32, num_kv_heads=32, head_dim=64)
    ffn = layer.ffn
    assert (ffn.d_ff, ffn.gated, ffn.activation, ffn.gate_bias) == (d_ff, gated, activation, False)
    # attention 4 D^2, FFN 2 or 3 D F, two norms; embedding; final norm.
    per_layer = 4 * 2048**2 + (3 if gated else 2) * 2048 * d_ff + 2 * 2048
    assert count(param_shapes(config)) == 49152 * 2048 + layers * per_layer + 2048


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
    ],
)
def test_llama_counts_without_memory(name, parameters):
    tracemalloc.start()
    config = presets.get(name)
    shapes = param_shapes(config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count(shapes) == parameters
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    assert peak < 10e6
    assert config.rope == RopeConfig(
        theta=500000.0,
        scaling="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context=8192,
    )
    assert not config.tie_embeddings and config.context_length == 131072


def test_small_presets():
    tiny, small = presets.get("tiny"), presets.get("125m")
    assert tiny == presets.tiny() and tiny.dtype == "float32" and tiny.vocab_size >= 257
    assert small == presets.small_125m() and small.num_layers == 12 and small.d_model == 768
    assert 1.1e8 < count(param_shapes(small)) < 1.35e8
    # Without a gate the FFN has about as many parameters: 2 x 3/2 F against 3 x F.
    for base in ("tiny", "125m"):
        gated, plain = count(param_shapes(presets.get(base))), presets.get(base + "-nongated")
        assert math.isclose(gated, count(param_shapes(plain)), rel_tol=1e-9)


def test_names_are_all_known_and_distinct():
    names = presets.names()
    assert len(names) == 6 * 3 + 3 == len({presets.get(n) for n in names})


@pytest.mark.parametrize("name", ["3b", "2b-", "2b-sparse", "", "llama-3.1-7b", "TINY"])
def test_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="unknown preset") as caught:
        presets.get(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in presets.names())


def test_unknown_name_suggests_a_close_one():
    with pytest.raises(ValueError, match=r"did you mean 'llama-3.1-8b'"):
        presets.get("llama-3.1-8B")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: presets.published("3b"), r"size must be one of \['0.5b', .*got '3b'"),
        (lambda: presets.published("2b", "relu"), "variant must be one of .*got 'relu'"),
        (lambda: presets.llama31("7b"), "size must be one of .*got '7b'"),
        (lambda: presets.tiny("moe"), "variant must be one of"),
    ],
)
def test_unknown_size_or_variant(make, message):
    with pytest.raises(ValueError, match=message):
        make()
