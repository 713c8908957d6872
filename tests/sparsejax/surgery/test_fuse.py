"""Fused runs against the sum over layers written out in NumPy, and the way back."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
import sparsejax
from sparsejax import Options, check_params, init_params, param_shapes, presets
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, RopeConfig
from sparsejax.params import count, flatten
from sparsejax.surgery import (
    FusionReport,
    fuse_ffns,
    parallelize_blocks,
    plan_fusion,
    remove_attention,
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


def test_plan_and_report():
    config, report = plan_fusion(MIXED, GROUPS)
    assert report == FusionReport(
        old_to_new=(0, 1, 1, 1, 2, 3, 3, 4),
        new_to_old=((0,), (1, 2, 3), (4,), (5, 6), (7,)),
    )
    wide = FFNConfig(d_ff=48, gate_bias=True)
    assert config.layers[1] == LayerConfig(attention=None, ffn=wide)
    assert config.layers[3:] == (bare(56), bare(8))
    assert fuse_ffns(MIXED, param_shapes(MIXED), GROUPS)[0] == config
    assert plan_fusion(MIXED, [])[0] == MIXED


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


def test_splitting_undoes_fusing_bit_for_bit():
    layers = (WHOLE, bare(16), parallel(bare(24)), parallel(bare(8)), WHOLE)
    config = model(*layers)
    params = random_params(config)
    for layer in ("layer_1", "layer_2"):
        params[layer]["ffn_norm"]["scale"] = params["layer_3"]["ffn_norm"]["scale"]
    back, back_params = split_ffn(*fuse_ffns(config, params, [(1, 2, 3)]), 1, [16, 24, 8])
    assert back == config
    same_bits(back_params, params)
    # From sequential layers: the same weights, read side by side.
    sequential = model(WHOLE, bare(16), bare(24), bare(8), WHOLE)
    back, back_params = split_ffn(*fuse_ffns(sequential, params, [(1, 2, 3)]), 1, [16, 24, 8])
    assert back == config
    same_bits(back_params, params)


@pytest.mark.parametrize("changes", [{"gate_bias": True}, {"gated": False, "activation": "silu"}])
def test_splitting_does_not_change_the_function(changes):
    config = model(WHOLE, parallel(bare(40, **changes)), parallel(WHOLE), WHOLE)
    params = random_params(config)
    new, new_params = split_ffn(config, params, 1, [8, 30, 2])
    parts = [parallel(bare(n, **changes)) for n in (8, 30, 2)]
    assert new.layers == (WHOLE, *parts, parallel(WHOLE), WHOLE)
    close(apply(new, new_params), np.asarray(apply(config, params), np.float64))
    # Every path has an array of its own: a training step may donate the tree.
    assert len({id(leaf) for leaf in jax.tree.leaves(new_params)}) == len(flatten(new_params))


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


def test_the_published_253b_planned_on_shapes_alone():
    """126 layers with 50 attentions and, in four runs, 45 of 49 steps gone: 81 layers."""
    config = presets.get("llama-3.1-405b")
    params = param_shapes(config)
    total = count(params)
    assert total > 4e11
    config, params = remove_attention(config, params, range(66, 116))
    without = count(params)
    groups = [range(66, 74), range(74, 86), range(86, 101), range(101, 115)]
    for norm in ("last", "fold"):
        fused, fused_params = fuse_ffns(config, params, groups, norm)
        check_params(fused, fused_params)
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(fused_params))
        assert fused.num_layers == 81 and len(fused.attention_layers) == 76
        assert [fused.layers[i].ffn.d_ff for i in range(66, 71)] == [
            53248 * n for n in (8, 12, 15, 14, 1)
        ]
        # Nothing is lost but 45 norms.
        assert count(fused_params) == without - 45 * 16384
    assert total - without == 50 * (2 * 16384 * 136 * 128 + 16384)
    back, back_params = split_ffn(fused, fused_params, 66, [53248] * 8)
    assert back.num_layers == 88 and count(back_params) == count(fused_params) + 7 * 16384


def test_wrong_groups():
    params = param_shapes(MIXED)
    cases = {
        "groups[0] and groups[1] overlap in layer 3": [(2, 3), (3, 4)],
        "groups[1] names layer 8, and the model's layers are 0 to 7": [(1, 2), (7, 8)],
        "groups[0] names layer -1, and": [(-1, 0)],
        "groups[0] must list consecutive layers in ascending order, got [1, 3]; layers 1 to 3 are "
        "range(1, 4)": [(1, 3)],
        "ascending order, got [2, 1]": [(2, 1)],
        "groups[0] must name two consecutive layers or more, got [2]": [(2,)],
        "groups[1] must name two consecutive layers or more, got []": [(1, 2), ()],
        "groups must be a list of runs of layers such as [range(2, 5)], got 1": (1, 2),
        "groups[0] = [3, 4, 5] has attention inside, in layer 4; only attention-free layers "
        "become one: remove_attention(config, params, [4])": [(3, 4, 5)],
        "groups[0] = [0, 1] has attention inside, in layer 0": [(0, 1)],
        "groups[0] must hold layer indices, got 1.0": [(1.0, 2.0)],
    }
    for message, groups in cases.items():
        for call in (lambda g=groups: fuse_ffns(MIXED, params, g), lambda g=groups: plan(g)):
            with pytest.raises(ValueError, match=re.escape(message)):
                call()
    with pytest.raises(ValueError, match="norm must be 'last' or 'fold', got 'mean'"):
        fuse_ffns(MIXED, params, GROUPS, "mean")  # type: ignore[arg-type]


def plan(groups):
    return plan_fusion(MIXED, groups)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((bare(8), bare(8, gated=False)), "layer 0 is gated relu; layer 1 is not gated relu"),
        ((bare(8), EMPTY, bare(8, activation="silu")), "layer 2 is gated silu"),
        ((EMPTY, EMPTY), "would give an empty layer: none of them has a feed-forward part"),
    ],
)
def test_groups_that_make_no_layer(layers, message):
    config = model(*layers)
    with pytest.raises(ValueError, match=message):
        fuse_ffns(config, param_shapes(config), [range(len(layers))])


def test_mixed_dtypes_and_params_of_another_model():
    params = random_params(MIXED)
    params["layer_2"]["ffn"]["up"] = params["layer_2"]["ffn"]["up"].astype(jnp.bfloat16)
    message = "layer_1/ffn/up is float32 and layer_2/ffn/up is bfloat16; cast"
    with pytest.raises(ValueError, match=message):
        fuse_ffns(MIXED, params, GROUPS)
    with pytest.raises(ValueError, match="layer_7/ffn/up: missing"):
        fuse_ffns(MIXED, param_shapes(MIXED.replace(layers=MIXED.layers[:7])), GROUPS)


def test_an_empty_layer_leaves_a_group_and_a_lone_one_is_itself():
    config = model(EMPTY, bare(16), EMPTY)
    params = init_params(config, jax.random.key(0))
    fused, fused_params = fuse_ffns(config, params, [range(3)])
    assert fused.layers == (bare(16),)
    assert fused_params["layer_0"]["ffn"]["up"] is params["layer_1"]["ffn"]["up"]


def test_wrong_splits():
    params = param_shapes(MIXED)
    cases = {
        (0, (12, 12)): "layer 0 has attention, whose output only the first part would read; "
        "remove it first: remove_attention(config, params, 0)",
        (1, (16,)): "widths must be two or more that add up to layer 1's d_ff = 16, got [16] = 16",
        (1, (8, 9)): "d_ff = 16, got [8, 9] = 17",
        (1, (16, 0)): "widths[1] must be a positive integer, got 0",
        (1, (8.0, 8.0)): "widths[0] must be a positive integer, got 8.0",
        (8, (8, 8)): "layers names layer 8, and the model's layers are 0 to 7",
    }
    for (layer, widths), message in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            split_ffn(MIXED, params, layer, widths)
    config = model(EMPTY, bare(8))
    with pytest.raises(ValueError, match=r"layer 0 has no feed-forward part.*one: \[1\]"):
        split_ffn(config, param_shapes(config), 0, [4, 4])
