"""Modules: norms and lookups, dtypes they read, and the tree that Module.init gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import forward, init_params, param_shapes, presets
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.modules import Options, Transformer, rms_norm
from sparsejax.params import flatten

FFN = LayerConfig(attention=None, ffn=FFNConfig(d_ff=24))


def bare(**changes):
    """A model of embedding and final norm only."""
    kwargs = {"vocab_size": 10, "d_model": 8, "layers": (), "dtype": "float32"} | changes
    return ModelConfig(**kwargs)


def test_rms_norm():
    x = np.asarray(jax.random.normal(jax.random.key(0), (3, 5, 16))) * 7
    scale = np.asarray(jax.random.normal(jax.random.key(1), (16,)))
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), scale, 1e-5), want, rtol=2e-6, atol=1e-6)
    assert not rms_norm(jnp.zeros((2, 16)), jnp.asarray(scale), 1e-5).any()


def test_rms_norm_of_half_precision_sums_in_float32():
    x = jnp.full((1, 2048), 300.0, jnp.float16)  # 300^2 is beyond float16
    y = rms_norm(x, jnp.full((2048,), 1.5), 1e-6)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(y.astype(jnp.float32), 1.5, rtol=1e-3)


ODD = ModelConfig(
    vocab_size=19,
    d_model=12,
    layers=(
        LayerConfig(
            attention=AttentionConfig(
                num_heads=4, num_kv_heads=2, head_dim=6, qkv_bias=True, qk_norm=True
            ),
            ffn=FFNConfig(d_ff=20, gate_bias=True),
        ),
        LayerConfig(attention=None, ffn=FFNConfig(d_ff=9, gated=False, gate_bias=True)),
        LayerConfig(attention=None, ffn=None),
        LayerConfig(
            attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=4),
            ffn=None,
            parallel_with_previous=True,
        ),
    ),
    tie_embeddings=False,
    param_dtype="bfloat16",
)


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ODD, id="odd"),
        pytest.param(ODD.replace(tie_embeddings=True), id="tied"),
        *(pytest.param(presets.get(n), id=n) for n in ("tiny", "2b-nongated", "llama-3.1-8b")),
    ],
)
def test_module_init_gives_exactly_the_parameter_tree(config, remat):
    """`lm_head` apart, which belongs to the head and not to the Transformer module."""
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    module = Transformer(config, Options(remat=remat))
    made = jax.eval_shape(module.init, jax.random.key(0), tokens)
    assert set(made) == {"params"}
    wanted = flatten(param_shapes(config))
    assert ("lm_head/kernel" in wanted) == (not config.tie_embeddings)
    wanted.pop("lm_head/kernel", None)
    got = flatten(made["params"])
    assert {p: (a.shape, a.dtype) for p, a in got.items()} == {
        p: (a.shape, a.dtype) for p, a in wanted.items()
    }


def test_module_init_draws_as_init_params_does():
    config = bare(layers=(FFN,), vocab_size=500, init_std=0.3)
    made = Transformer(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    assert abs(np.std(made["embed"]["embedding"]) / 0.3 - 1) < 0.06
    assert abs(np.std(made["layer_0"]["ffn"]["down"]) / (0.3 / 2**0.5) - 1) < 0.25
    assert (made["final_norm"]["scale"] == 1).all()


@pytest.mark.parametrize("token", [-1, -10, 10, 2**31 - 1])
def test_an_id_outside_the_vocabulary_gives_nan_never_another_row(token):
    config = bare()
    params = init_params(config, jax.random.key(0))
    hidden = forward(config, params, jnp.array([[3, token], [9, 0]], jnp.int32)).hidden
    assert np.isnan(hidden[0, 1]).all()
    assert np.isfinite(hidden[0, 0]).all() and np.isfinite(hidden[1]).all()


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.int16])
def test_narrow_token_dtypes(dtype):
    config = bare(vocab_size=256)
    params = init_params(config, jax.random.key(0))
    tokens = jnp.array([[0, 100, 127]], jnp.int32)
    np.testing.assert_array_equal(
        forward(config, params, tokens.astype(dtype)).hidden, forward(config, params, tokens).hidden
    )


@pytest.mark.parametrize("leaf", ["embed/embedding", "attn/v_bias", "ffn/gate_bias"])
def test_gradients_that_sum_over_tokens_sum_in_float32(leaf):
    """4096 equal terms in bfloat16 would stop growing at 256."""
    tokens, dtype = jnp.zeros((1, 4096), jnp.int32), "bfloat16"
    if leaf == "embed/embedding":
        config = bare(dtype=dtype)
    elif leaf == "ffn/gate_bias":
        ffn = FFNConfig(d_ff=4, gate_bias=True)
        config = bare(dtype=dtype, layers=(LayerConfig(attention=None, ffn=ffn),))
    else:
        a = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=4, qkv_bias=True)
        config = bare(dtype=dtype, layers=(LayerConfig(attention=a, ffn=None),))
        tokens = tokens.reshape(512, 8)  # short rows: dense attention over 4096 is slow
    params = init_params(config.replace(init_std=0.5), jax.random.key(5))
    weight = jax.random.normal(jax.random.key(6), (8,))

    def total(params, config):
        hidden = forward(config, params, tokens).hidden
        return jnp.sum(hidden.astype(jnp.float32) * weight)

    def grad(config):
        grads = flatten(jax.jit(jax.grad(total), static_argnums=1)(params, config))
        return next(g for path, g in grads.items() if path.endswith(leaf))

    got, want = grad(config), grad(config.replace(dtype="float32"))
    assert got.dtype == jnp.float32
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.05


def test_norm_scales_are_read_in_float32():
    """A scale of 1 + 2^-9 is 1 in bfloat16; with x beside a rounding edge it still shows."""
    config = bare(dtype="bfloat16", d_model=512)
    params = init_params(config, jax.random.key(0))
    tokens = jnp.arange(10, dtype=jnp.int32)[None]
    plain = forward(config, params, tokens).hidden
    params["final_norm"]["scale"] += 2.0**-9
    scaled = forward(config, params, tokens).hidden
    changed = np.mean(np.asarray(plain != scaled))
    assert 0.2 < changed < 0.8


def test_options():
    with pytest.raises(
        ValueError, match=r"remat must be one of \['none', 'full', 'dots'\], got 'x'"
    ):
        Options(remat="x")
    assert hash(Options()) == hash(Options())


def test_the_implementation_reaches_the_op():
    config = bare(layers=(FFN,))
    params = init_params(config, jax.random.key(0))
    with pytest.raises(ValueError, match=r"implementation must be one of .*got 'cuda'"):
        forward(config, params, jnp.zeros((1, 1), jnp.int32), options=Options("cuda"))
