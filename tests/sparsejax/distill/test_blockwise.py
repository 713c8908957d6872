"""Errors of single blocks on the teacher's activations, against NumPy and against whole models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from sparsejax import (
    AttentionConfig,
    FFNConfig,
    LayerConfig,
    ModelConfig,
    Options,
    RopeConfig,
    forward,
    init_params,
    surgery,
)
from sparsejax.distill.blockwise import block_errors, blocks_of, choose_blocks
from sparsejax.params import flatten

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
LAYER = LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=24))
TEACHER = ModelConfig(
    vocab_size=48,
    d_model=16,
    layers=(LAYER,) * 4,
    rope=RopeConfig(theta=1e4),
    init_std=0.2,
    dtype="float32",
)
PARAMS = init_params(TEACHER, jax.random.key(0))
TOKENS = jax.random.randint(jax.random.key(1), (2, 6), 0, 48)
CAPTURE = Options(capture_hidden=True)
WEIGHTS = jnp.asarray(np.random.default_rng(0).uniform(size=(2, 6)), jnp.float32).at[0, 0].set(0)


@pytest.fixture(scope="module")
def teacher():
    return jax.jit(lambda p, t: forward(TEACHER, p, t, options=CAPTURE))(PARAMS, TOKENS)


@pytest.fixture(scope="module")
def fused():
    config, params = surgery.remove_attention(TEACHER, PARAMS, [1, 2])
    return surgery.fuse_ffns(config, params, [(1, 2)])


def errors(config, params, teacher, layer_map, layers=None, remat="none"):
    blocks = choose_blocks(config, layer_map, layers)
    return block_errors(
        config, params, teacher, layer_map, blocks, WEIGHTS, options=Options(remat=remat)
    )


def test_the_teachers_own_blocks_have_no_error(teacher):
    got, stats = errors(TEACHER, PARAMS, teacher, (0, 1, 2, 3))
    np.testing.assert_allclose(got, np.zeros(4), atol=1e-10)
    assert sorted(stats) == [0, 1, 2, 3]
    want = teacher.stats.nnz
    np.testing.assert_array_equal(np.stack([stats[i].nnz for i in range(4)]), want)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_each_block_runs_its_layers_engines(teacher):
    blocks = choose_blocks(TEACHER, (0, 1, 2, 3), [1, 2])
    engines = ("none", "xla", "triton", "none")  # those of layers that do not run are not read
    with pallas_kernels.interpret():
        got, stats = block_errors(
            TEACHER,
            PARAMS,
            teacher,
            (0, 1, 2, 3),
            blocks,
            WEIGHTS,
            options=Options(implementation=engines),
        )
    np.testing.assert_allclose(got, np.zeros(2), atol=1e-10)
    assert {i: float(s.sparse) for i, s in stats.items()} == {1: 0, 2: 1}


def test_a_block_that_does_nothing_has_error_one(teacher):
    params = jax.tree.map(jnp.zeros_like, PARAMS)
    got, _ = errors(TEACHER, params, teacher, (0, 1, 2, 3))
    np.testing.assert_allclose(got, np.ones(4), rtol=1e-6)


def test_a_fused_block_against_numpy(teacher, fused):
    config, params = fused
    got, _ = errors(config, params, teacher, (0, 2, 3))
    states = [np.asarray(x, np.float64) for x in teacher.hidden_states]
    layer = jax.tree.map(lambda x: np.asarray(x, np.float64), params["layer_1"])
    x, after = states[1], states[3]
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * layer["ffn_norm"]["scale"]
    gate, up = normed @ layer["ffn"]["gate"].T, normed @ layer["ffn"]["up"].T
    made = (np.maximum(gate, 0) * up) @ layer["ffn"]["down"]
    weights = np.asarray(WEIGHTS, np.float64)[..., None]
    wanted = after - x
    want = (weights * (made - wanted) ** 2).sum() / (weights * wanted**2).sum()
    np.testing.assert_allclose(got, [0, want, 0], rtol=2e-5, atol=1e-10)
    assert want > 0.1


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_stay_in_their_blocks(teacher, fused, remat):
    config, params = fused

    def f(params, states):
        output = dataclasses.replace(teacher, hidden_states=states)
        return errors(config, params, output, (0, 2, 3), [1], remat)[0].sum()

    to_params, to_teacher = jax.jit(jax.grad(f, argnums=(0, 1)))(params, teacher.hidden_states)
    assert not any(np.any(g) for g in to_teacher)
    for path, grad in flatten(to_params).items():
        assert np.any(grad) == path.startswith("layer_1/"), path
    # Against finite differences along one direction.
    down = params["layer_1"]["ffn"]["down"]
    direction = np.random.default_rng(1).normal(size=down.shape).astype(np.float32)

    def moved(h):
        ffn = params["layer_1"]["ffn"] | {"down": down + h * direction}
        return f(params | {"layer_1": params["layer_1"] | {"ffn": ffn}}, teacher.hidden_states)

    slope = (moved(1e-2) - moved(-1e-2)) / 2e-2
    along = (to_params["layer_1"]["ffn"]["down"] * direction).sum()
    np.testing.assert_allclose(along, slope, rtol=1e-3)


def test_parallel_layers_read_what_their_run_reads(teacher):
    config, params = surgery.parallelize_blocks(TEACHER, PARAMS, [(1, 2)])
    got, _ = errors(config, params, teacher, (0, 1, 2, 3))
    np.testing.assert_allclose(got[np.array([0, 1, 3])], np.zeros(3), atol=1e-10)
    # Layer 2 alone, on the stream before layer 1: the last two layers of a two-layer model.
    whole = forward(config, params, TOKENS, options=CAPTURE).hidden_states
    made = np.asarray(whole[3] - whole[2], np.float64)
    wanted = np.asarray(teacher.hidden_states[3] - teacher.hidden_states[2], np.float64)
    weights = np.asarray(WEIGHTS, np.float64)[..., None]
    want = (weights * (made - wanted) ** 2).sum() / (weights * wanted**2).sum()
    np.testing.assert_allclose(got[2], want, rtol=1e-4)


def test_layers_without_a_teacher_layer_join_the_next(teacher):
    assert blocks_of((None, 1, None, None, 4)) == ((0, 1), (2, 3, 4))
    got, stats = errors(TEACHER, PARAMS, teacher, (0, None, None, 3))
    np.testing.assert_allclose(got, np.zeros(2), atol=1e-9)
    assert sorted(stats) == [0, 1, 2, 3]
    config, params = surgery.parallelize_blocks(TEACHER, PARAMS, [(2, 3)])
    with pytest.raises(ValueError, match=r"block \[3\] continues the parallel run .* layer 2"):
        errors(config, params, teacher, (0, None, 2, 3), [3])


def test_choosing_blocks():
    config = TEACHER.replace(layers=(LAYER, LayerConfig(attention=None, ffn=None), LAYER, LAYER))
    layer_map = (0, 1, 2, 3)
    assert choose_blocks(config, layer_map, None) == ((0,), (2,), (3,))
    assert choose_blocks(config, layer_map, [3, 0]) == ((0,), (3,))
    with pytest.raises(ValueError, match=r"student layer 1, .* are \[0, 2, 3\]"):
        choose_blocks(config, layer_map, [1])
    with pytest.raises(ValueError, match="no layer of the student has parameters"):
        choose_blocks(config.replace(layers=config.layers[1:2]), (0,), None)
