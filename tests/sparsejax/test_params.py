"""The parameter tree: shapes, initial statistics, selection, and complaints by path."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import check_params, init_params, param_shapes, presets
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.params import count, flatten, leaf_initializer, select

LAYER = LayerConfig(
    attention=AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=16, qkv_bias=True, qk_norm=True
    ),
    ffn=FFNConfig(d_ff=96, gate_bias=True),
)
CONFIG = ModelConfig(
    vocab_size=200,
    d_model=64,
    layers=(
        LAYER,
        LayerConfig(attention=None, ffn=FFNConfig(d_ff=80, gated=False)),
        LayerConfig(attention=None, ffn=None),
        LayerConfig(attention=LAYER.attention, ffn=None),
    ),
    tie_embeddings=False,
    init_std=0.05,
)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(3))


def test_shapes_written_out():
    got = {path: leaf.shape for path, leaf in flatten(param_shapes(CONFIG)).items()}
    attention = {
        "attn_norm/scale": (64,),
        "attn/q": (64, 4, 16),
        "attn/k": (64, 2, 16),
        "attn/v": (64, 2, 16),
        "attn/o": (4, 16, 64),
        "attn/q_bias": (4, 16),
        "attn/k_bias": (2, 16),
        "attn/v_bias": (2, 16),
        "attn/q_norm": (16,),
        "attn/k_norm": (16,),
    }
    ffn = {"gate": (96, 64), "up": (96, 64), "down": (96, 64), "gate_bias": (96,)}
    assert got == {
        "embed/embedding": (200, 64),
        **{f"layer_0/{name}": shape for name, shape in attention.items()},
        "layer_0/ffn_norm/scale": (64,),
        **{f"layer_0/ffn/{name}": shape for name, shape in ffn.items()},
        "layer_1/ffn_norm/scale": (64,),
        "layer_1/ffn/up": (80, 64),
        "layer_1/ffn/down": (80, 64),
        **{f"layer_3/{name}": shape for name, shape in attention.items()},
        "final_norm/scale": (64,),
        "lm_head/kernel": (64, 200),
    }
    assert "lm_head" not in param_shapes(CONFIG.replace(tie_embeddings=True))
    assert count(param_shapes(CONFIG)) == sum(int(np.prod(s)) for s in got.values())


def test_initial_statistics(params):
    residual = 0.05 / np.sqrt(2 * 4)
    for path, leaf in flatten(params).items():
        values = np.asarray(leaf, np.float64)
        kind = path.rsplit("/", 1)[-1]
        if kind in ("scale", "q_norm", "k_norm"):
            assert (values == 1).all(), path
        elif kind.endswith("bias"):
            assert (values == 0).all(), path
        else:
            std = residual if kind in ("o", "down") else 0.05
            n = values.size
            # Five standard errors of the mean and of the standard deviation.
            assert abs(values.mean()) < 5 * std / np.sqrt(n), path
            assert abs(values.std() / std - 1) < 5 / np.sqrt(2 * n), path


def test_leaves_are_independent_draws(params):
    flat = {p: np.ravel(a)[:1024] for p, a in flatten(params).items() if a.size >= 1024}
    names = list(flat)
    correlation = np.corrcoef(np.stack(list(flat.values()))) - np.eye(len(names))
    assert np.abs(correlation).max() < 5 / np.sqrt(1024), names


def test_draws_do_not_depend_on_other_leaves(params):
    longer = CONFIG.replace(layers=(*CONFIG.layers, LAYER))
    more = flatten(init_params(longer, jax.random.key(3)))
    for path, leaf in flatten(params).items():
        if path.endswith(("attn/o", "ffn/down")):  # divided by sqrt(2 x layers): 4, then 5
            np.testing.assert_allclose(more[path], leaf * np.float32(np.sqrt(4 / 5)), rtol=1e-6)
        else:
            np.testing.assert_array_equal(more[path], leaf)


def test_key_and_dtype(params):
    other = flatten(init_params(CONFIG, jax.random.key(4)))
    assert not np.array_equal(other["layer_0/ffn/up"], params["layer_0"]["ffn"]["up"])
    half = init_params(CONFIG.replace(param_dtype="bfloat16"), jax.random.key(3))
    for path, leaf in flatten(half).items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, flatten(params)[path].astype(jnp.bfloat16))


def test_same_values_under_jit():
    config = CONFIG.replace(layers=CONFIG.layers[1:2], vocab_size=32)
    eager = init_params(config, jax.random.key(3))
    jitted = jax.jit(init_params, static_argnums=0)(config, jax.random.key(3))
    for path, leaf in flatten(jitted).items():
        np.testing.assert_allclose(leaf, flatten(eager)[path], rtol=1e-6, err_msg=path)


def test_leaf_initializer_is_what_init_params_uses():
    draw = leaf_initializer(CONFIG, "layer_0/ffn/gate")(jax.random.key(0), (500, 64), jnp.float32)
    assert abs(float(jnp.std(draw)) / 0.05 - 1) < 0.02
    assert (leaf_initializer(CONFIG, "a/scale")(jax.random.key(0), (3,), jnp.float32) == 1).all()


@pytest.mark.parametrize("name", presets.names())
def test_presets_check_as_shapes(name):
    config = presets.get(name)
    check_params(config, param_shapes(config))


def test_check_lists_every_problem(params):
    broken = jax.tree.map(lambda x: x, params)
    del broken["layer_0"]["ffn"]["gate"]
    broken["layer_0"]["attn"]["q"] = jnp.zeros((64, 16, 4))
    broken["layer_1"]["ffn"]["gate"] = jnp.zeros((80, 64))
    broken["final_norm"]["scale"] = jnp.ones((64,), jnp.int32)
    with pytest.raises(ValueError, match="parameters do not fit the config") as caught:
        check_params(CONFIG, broken)
    assert set(str(caught.value).splitlines()[1:]) == {
        "  layer_0/ffn/gate: missing, expected shape [96, 64]",
        "  layer_0/attn/q: expected shape [64, 4, 16], got [64, 16, 4]",
        "  layer_1/ffn/gate: not in the config, shape [80, 64]",
        "  final_norm/scale: expected a floating dtype, got int32",
    }


def test_check_takes_any_floating_dtype_and_arrays(params):
    check_params(CONFIG, params)
    check_params(CONFIG, jax.tree.map(lambda a: a.astype(jnp.float16), params))
    check_params(CONFIG, jax.tree.map(np.asarray, params))
    retied = CONFIG.replace(tie_embeddings=True)
    with pytest.raises(ValueError, match="lm_head/kernel: not in the config"):
        check_params(retied, params)


def test_select(params):
    assert list(select(params, r"ffn/up$")) == ["layer_0/ffn/up", "layer_1/ffn/up"]
    assert select(params, "^final")["final_norm/scale"] is params["final_norm"]["scale"]
    with pytest.raises(ValueError, match=r"no path matches 'mlp'; paths look like \['embed/"):
        select(params, "mlp")


def test_count():
    assert count({"a": np.zeros((3, 4)), "b": {"c": np.zeros(())}}) == 13
    wider = dataclasses.replace(LAYER, ffn=FFNConfig(d_ff=97, gate_bias=True))
    more = count(param_shapes(CONFIG.replace(layers=(wider, *CONFIG.layers[1:]))))
    assert more - count(param_shapes(CONFIG)) == 3 * 64 + 1
