"""Fused runs against the sum over layers written out in NumPy, and the way back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
import sparsejax
from sparsejax import Options, param_shapes
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, RopeConfig
from sparsejax.params import flatten
from sparsejax.surgery import (
    fuse_ffns,
    parallelize_blocks,
    split_ffn,
)
from sparsejax.training.checkpoint import Checkpointer
from tests.sparsejax.test_model import close, np_attention, np_ffn, np_norm, random_params

ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
WHOLE = LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=24))
EMPTY = LayerConfig(attention=None, ffn=None)
TOKENS = np.random.default_rng(0).integers(0, 48, (2, 9))


def bare(d_ff, **changes):
    return LayerConfig(attention=None, ffn=FFNConfig(d_ff=d_ff, **changes))


def parallel(layer):
    return dataclasses.replace(layer, parallel_with_previous=True)


def model(*layers):
    return ModelConfig(
        vocab_size=48,
        d_model=32,
        layers=layers,
        rope=RopeConfig(theta=1e4),
        norm_eps=1e-3,
        dtype="float32",
    )


MIXED = model(
    WHOLE, bare(16), bare(24, gate_bias=True), bare(8), WHOLE, bare(40), bare(16), bare(8)
)
GROUPS = [(1, 2, 3), (5, 6)]


def apply(config, params, tokens=TOKENS, **options):
    with jax.default_matmul_precision("highest"):
        return sparsejax.apply(config, params, jnp.asarray(tokens), options=Options(**options))


def same_bits(got, want):
    assert list(flatten(got)) == list(flatten(want))
    for path, leaf in flatten(got).items():
        assert leaf.dtype == flatten(want)[path].dtype, path
        np.testing.assert_array_equal(leaf, flatten(want)[path], err_msg=path)


def np_fused(config, params, tokens, groups, norm):
    """The sequential model, but y = x + sum_k FFN_k(norm_k(x)) for each group; float64."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x = p["embed"]["embedding"][tokens]
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)

    def ffn(layer, scale_of, x):
        scale = p[f"layer_{scale_of}"]["ffn_norm"]["scale"]
        normed = np_norm(x, scale, config.norm_eps)
        return np_ffn(config.layers[layer].ffn, p[f"layer_{layer}"]["ffn"], normed)[0]

    layer = 0
    while layer < config.num_layers:
        group = next((g for g in groups if g[0] == layer), (layer,))
        if len(group) > 1:
            members = [k for k in group if config.layers[k].ffn]
            x = x + sum(ffn(k, members[-1] if norm == "last" else k, x) for k in members)
        else:
            attention = config.layers[layer].attention
            if attention:
                part = p[f"layer_{layer}"]
                normed = np_norm(x, part["attn_norm"]["scale"], config.norm_eps)
                zeros = np.zeros(tokens.shape)
                x = x + np_attention(attention, part["attn"], normed, positions, zeros, config)
            x = x + ffn(layer, layer, x)
        layer += len(group)
    x = np_norm(x, p["final_norm"]["scale"], config.norm_eps)
    return x @ p["embed"]["embedding"].T


def drawn(seed):
    """A model with one run of two to four attention-free layers of any kind, somewhere in it."""
    rng = np.random.default_rng(seed)
    kind = {"gated": bool(rng.integers(2)), "activation": str(rng.choice(["relu", "silu"]))}
    run = [
        bare(int(rng.integers(1, 6)) * 8, gate_bias=bool(rng.integers(2)), **kind)
        for _ in range(rng.integers(2, 5))
    ]
    before = int(rng.integers(0, 3))
    group = tuple(range(before, before + len(run)))
    return model(*[WHOLE] * before, *run, *[WHOLE] * int(rng.integers(0, 2))), [group]


CASES = {"mixed": (MIXED, GROUPS)} | {f"drawn {seed}": drawn(seed) for seed in (0, 1, 3, 11)}


@pytest.mark.parametrize("norm", ["last", "fold"])
@pytest.mark.parametrize(("config", "groups"), CASES.values(), ids=CASES)
def test_a_fused_run_is_the_sum_over_its_layers(config, groups, norm):
    params = random_params(config)
    before = dict(flatten(params))
    fused, fused_params = fuse_ffns(config, params, groups, norm)
    assert fused.num_layers == config.num_layers - sum(len(g) - 1 for g in groups)
    want = np_fused(config, params, TOKENS, groups, norm)
    close(apply(fused, fused_params), want)
    # The other rule, and the layers one after the other, are other functions.
    other = np_fused(config, params, TOKENS, groups, "fold" if norm == "last" else "last")
    sequential = np_fused(config, params, TOKENS, [], norm)
    assert min(np.abs(want - other).max(), np.abs(want - sequential).max()) > 0.01 * want.std()
    assert all(before[path] is leaf for path, leaf in flatten(params).items())


def test_the_cases_cover_all_kinds():
    kinds = {
        (config.layers[i].ffn.gated, config.layers[i].ffn.activation)
        for config, groups in CASES.values()
        for i in groups[0]
    }
    assert kinds == {(g, a) for g in (True, False) for a in ("relu", "silu")}


def test_fold_is_the_parallel_model():
    """Also of runs inside a longer parallel run, and before a layer that is parallel with it."""
    config = model(WHOLE, parallel(bare(16)), bare(24), EMPTY, parallel(bare(8)), parallel(WHOLE))
    groups, params = [range(1, 5)], random_params(config)
    want = apply(*parallelize_blocks(config, params, groups))
    fused = fuse_ffns(config, params, groups, "fold")
    assert fused[0].layers == (WHOLE, parallel(bare(48)), parallel(WHOLE))
    close(apply(*fused), np.asarray(want, np.float64))


def test_the_weights_written_out():
    params = random_params(MIXED, seed=3)
    _, fused = fuse_ffns(MIXED, params, GROUPS)
    run = [params[f"layer_{i}"]["ffn"] for i in (1, 2, 3)]
    for name in ("gate", "up", "down"):
        want = np.concatenate([np.asarray(ffn[name]) for ffn in run])
        np.testing.assert_array_equal(fused["layer_1"]["ffn"][name], want)
    bias = np.concatenate([np.zeros(16), np.asarray(run[1]["gate_bias"]), np.zeros(8)])
    np.testing.assert_array_equal(fused["layer_1"]["ffn"]["gate_bias"], bias)
    # What no group touches is the very same array, under its new number.
    assert fused["layer_1"]["ffn_norm"]["scale"] is params["layer_3"]["ffn_norm"]["scale"]
    assert fused["layer_2"]["attn"]["q"] is params["layer_4"]["attn"]["q"]
    assert fused["layer_4"]["ffn"]["up"] is params["layer_7"]["ffn"]["up"]

    _, folded = fuse_ffns(MIXED, params, GROUPS, "fold")
    scale = np.asarray(params["layer_2"]["ffn_norm"]["scale"])
    for name, columns in (("gate", scale), ("up", scale), ("down", 1.0)):
        want = np.asarray(run[1][name]) * columns
        np.testing.assert_allclose(folded["layer_1"]["ffn"][name][16:40], want, rtol=1e-7)
    np.testing.assert_array_equal(folded["layer_1"]["ffn_norm"]["scale"], np.ones(32))
    np.testing.assert_array_equal(folded["layer_1"]["ffn"]["gate_bias"], bias)


def test_zeros_in_a_norm_scale_fold():
    config = model(bare(16), bare(8))
    params = random_params(config)
    for layer in ("layer_0", "layer_1"):
        scale = params[layer]["ffn_norm"]["scale"].at[3 if layer == "layer_0" else 5].set(0.0)
        params[layer]["ffn_norm"]["scale"] = scale
    got = apply(*fuse_ffns(config, params, [(0, 1)], "fold"))
    close(got, np_fused(config, params, TOKENS, [(0, 1)], "fold"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes_stay(dtype):
    params = jax.tree.map(lambda a: a.astype(dtype), random_params(MIXED))
    for norm in ("last", "fold"):
        _, fused = fuse_ffns(MIXED, params, GROUPS, norm)
        assert {leaf.dtype for leaf in jax.tree.leaves(fused)} == {jnp.dtype(dtype)}
    up, scale = (np.asarray(params["layer_1"][a][b], np.float32) for a, b in _UP_AND_SCALE)
    got = np.asarray(fused["layer_1"]["ffn"]["up"][:16])
    np.testing.assert_array_equal(got, (up * scale).astype(dtype))  # rounded once


_UP_AND_SCALE = (("ffn", "up"), ("ffn_norm", "scale"))


def test_gradients_of_the_fused_model_are_those_of_the_parallel_one():
    config = model(bare(16), parallel(bare(24, gate_bias=True)))
    params = random_params(config)
    probe = np.random.default_rng(1).normal(size=(*TOKENS.shape, 48)).astype(np.float32)

    def loss(config, params):
        return jnp.sum(sparsejax.apply(config, params, jnp.asarray(TOKENS)) * probe)

    def through_surgery(params, norm="fold"):
        return loss(*fuse_ffns(config, params, [(0, 1)], norm))

    with jax.default_matmul_precision("highest"):
        want = jax.grad(lambda p: loss(config, p))(params)
        got = jax.grad(through_surgery)(params)
        fused, fused_params = fuse_ffns(config, params, [(0, 1)], "last")
        of_fused = jax.grad(lambda p: loss(fused, p))(fused_params)
        of_parts = jax.grad(through_surgery)(params, "last")
    # With "fold" also the norms' gradients: they live in the columns now.
    for path, g in flatten(got).items():
        close(g, np.asarray(flatten(want)[path], np.float64), err_msg=path)
    for name in ("gate", "up", "down"):
        parts = [np.asarray(of_parts[f"layer_{i}"]["ffn"][name]) for i in (0, 1)]
        close(of_fused["layer_0"]["ffn"][name], np.concatenate(parts).astype(np.float64))
        assert all(np.abs(part).max() > 0 for part in parts)


def test_under_jit_the_same_bits():
    params = random_params(MIXED)
    for norm in ("last", "fold"):
        want = fuse_ffns(MIXED, params, GROUPS, norm)[1]
        same_bits(jax.jit(lambda p, n=norm: fuse_ffns(MIXED, p, GROUPS, n)[1])(params), want)
    fused, fused_params = fuse_ffns(MIXED, params, GROUPS)
    want = split_ffn(fused, fused_params, 1, [40, 8])[1]
    same_bits(jax.jit(lambda p: split_ffn(fused, p, 1, [40, 8])[1])(fused_params), want)


def test_the_sparse_engine_runs_the_fused_layer():
    config, params = fuse_ffns(*(c := model(bare(16), bare(32)), random_params(c)), [(0, 1)])
    tokens = TOKENS[:1, :4]
    with pallas_kernels.interpret():
        got = apply(config, params, tokens, implementation="triton")
    close(got, np.asarray(apply(config, params, tokens, implementation="xla"), np.float64))


def test_save_and_load(tmp_path):
    config, params = fuse_ffns(MIXED, random_params(MIXED), GROUPS, "fold")
    want = apply(config, params)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"params": params}, {"config": config.to_dict()})
    with Checkpointer(tmp_path) as checkpointer:
        loaded = ModelConfig.from_dict(checkpointer.read_extra()["config"])
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        template = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=device), param_shapes(loaded)
        )
        restored = checkpointer.restore_params(template).state
    assert loaded == config
    same_bits(restored, params)
    np.testing.assert_array_equal(apply(loaded, restored), want)
