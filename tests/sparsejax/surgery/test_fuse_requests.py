"""What fusing is asked for: plans on shapes alone, and requests that are refused."""

import re

import jax
import jax.numpy as jnp
import pytest

from sparsejax import check_params, init_params, param_shapes, presets
from sparsejax.config import FFNConfig, LayerConfig
from sparsejax.params import count
from sparsejax.surgery import FusionReport, fuse_ffns, plan_fusion, remove_attention, split_ffn
from tests.sparsejax.surgery.test_fuse import EMPTY, GROUPS, MIXED, bare, model
from tests.sparsejax.test_model import random_params


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
