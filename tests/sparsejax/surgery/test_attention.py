"""Attention removed, and key/value heads pooled, against NumPy."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import check_params, param_shapes
from sparsejax.attention import init_cache
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, RopeConfig
from sparsejax.params import flatten
from sparsejax.surgery import reduce_kv_heads, remove_attention, remove_ffn
from tests.sparsejax.test_model import close, np_model, random_params

ATTENTION = AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=4, qkv_bias=True, qk_norm=True)
LAYER = LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=24))
CONFIG = ModelConfig(
    vocab_size=48,
    d_model=32,
    layers=(LAYER, LAYER, dataclasses.replace(LAYER, ffn=None)),
    rope=RopeConfig(theta=1e4),
    norm_eps=1e-3,
    dtype="float32",
)
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 9))


def apply(config, params):
    with jax.default_matmul_precision("highest"):
        return sparsejax.apply(config, params, jnp.asarray(TOKENS))


def test_a_removed_attention_adds_nothing():
    params = random_params(CONFIG)
    got = apply(*remove_attention(CONFIG, params, [2, 0]))
    # The same as attention whose output projection is zero.
    silent = jax.tree.map(lambda x: x, params)
    for i in (0, 2):
        silent[f"layer_{i}"]["attn"]["o"] = jnp.zeros_like(params[f"layer_{i}"]["attn"]["o"])
    want = np_model(CONFIG, silent, TOKENS)[0]
    close(got, want)
    assert np.abs(np_model(CONFIG, params, TOKENS)[0] - want).max() > 0.1


def test_what_is_left():
    params = random_params(CONFIG)
    config, left = remove_attention(CONFIG, params, 0)
    assert config.layers == (dataclasses.replace(LAYER, attention=None), *CONFIG.layers[1:])
    gone = {path for path in flatten(params) if path.startswith("layer_0/attn")}
    assert len(gone) == 10 and set(flatten(left)) == set(flatten(params)) - gone
    assert all(leaf is flatten(params)[path] for path, leaf in flatten(left).items())
    # An empty layer keeps its place, and the cache is smaller.
    config, left = remove_attention(config, left, (2,))
    assert config.num_layers == 3 and "layer_2" not in left
    assert list(init_cache(config, 1, 4)) == ["layer_1"]
    assert apply(config, left).shape == (2, 9, 48)
    assert remove_attention(CONFIG, params, [])[0] == CONFIG


def test_parts_that_are_not_there():
    shapes = param_shapes(CONFIG)
    config, left = remove_attention(CONFIG, shapes, 1)
    cases = {
        "layer 1 has no attention; layers with attention: [0, 2]": lambda: remove_attention(
            config, left, [0, 1]
        ),
        "reduce_kv_heads: layer 1 has no attention": lambda: reduce_kv_heads(config, left, 1, 2),
        "layers names layer 0 more than once": lambda: remove_attention(config, left, [0, 0]),
        "remove_ffn: layer 2 has no feed-forward part; layers with one: [0, 1]": lambda: remove_ffn(
            config, left, 2
        ),
        "layers names layer 3, and the model's layers are 0 to 2": lambda: remove_attention(
            config, left, 3
        ),
        "the model's layers are none at all": lambda: remove_attention(
            CONFIG.replace(layers=()), {}, 0
        ),
        "layers must hold layer indices, got True": lambda: remove_attention(config, left, True),
        "layers must hold layer indices, got '1'": lambda: remove_attention(config, left, "1"),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.parametrize("heads", [1, 2])
def test_pooled_heads_are_means(heads):
    params = random_params(CONFIG)
    config, pooled = reduce_kv_heads(CONFIG, params, [0, 2], heads)
    assert config.layers[0].attention == dataclasses.replace(ATTENTION, num_kv_heads=heads)
    assert config.layers[1] == CONFIG.layers[1]
    ratio = 4 // heads
    for path, leaf in flatten(params).items():
        got = np.asarray(flatten(pooled)[path])
        layer, *_, name = path.split("/")
        if layer in ("layer_0", "layer_2") and name in ("k", "v", "k_bias", "v_bias"):
            axis = leaf.ndim - 2
            groups = np.split(np.asarray(leaf, np.float64), heads, axis=axis)
            want = np.stack([g.mean(axis) for g in groups], axis=axis)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7, err_msg=path)
            assert got.shape[axis] == leaf.shape[axis] // ratio
        else:
            assert flatten(pooled)[path] is leaf, path
    close(apply(config, pooled), np_model(config, pooled, TOKENS)[0])


def test_pooling_equal_heads_changes_nothing():
    """So every query head reads the mean of the head it read before."""
    params = random_params(CONFIG)
    attn = params["layer_0"]["attn"]
    for name, axis in (("k", 1), ("v", 1), ("k_bias", 0), ("v_bias", 0)):
        attn[name] = jnp.repeat(jnp.take(attn[name], jnp.array([0, 2]), axis=axis), 2, axis=axis)
    want = np.asarray(apply(CONFIG, params), np.float64)
    close(apply(*reduce_kv_heads(CONFIG, params, 0, 2)), want)


def test_pooling_in_half_precision_and_on_shapes():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(CONFIG))
    _, pooled = reduce_kv_heads(CONFIG, params, 1, 1)
    old = np.asarray(params["layer_1"]["attn"]["v"], np.float32)
    want = old.mean(1, keepdims=True).astype(jnp.bfloat16)
    assert pooled["layer_1"]["attn"]["v"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(pooled["layer_1"]["attn"]["v"], want)
    config, shapes = reduce_kv_heads(CONFIG, param_shapes(CONFIG), range(3), 2)
    check_params(config, shapes)
    assert isinstance(shapes["layer_1"]["attn"]["k"], jax.ShapeDtypeStruct)
    assert reduce_kv_heads(CONFIG, params, 1, 4)[0] == CONFIG


def test_numbers_of_heads_that_do_not_fit():
    shapes = param_shapes(CONFIG)
    for number, message in {
        3: "num_kv_heads must divide layer 0's 4, got 3; use one of [1, 2, 4]",
        8: "num_kv_heads must divide layer 0's 4, got 8",
        0: "num_kv_heads must be a positive integer, got 0",
        2.0: "num_kv_heads must be a positive integer, got 2.0",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            reduce_kv_heads(CONFIG, shapes, [0, 1], number)  # type: ignore[arg-type]
