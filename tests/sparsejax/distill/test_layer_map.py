"""Which teacher layer a student layer is compared with."""

import dataclasses

import pytest

from sparsejax import AttentionConfig, FFNConfig, LayerConfig, ModelConfig, param_shapes, surgery
from sparsejax.distill.layer_map import check_layer_map, derive_layer_map, layer_map_of

ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
LAYER = LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=32))
TEACHER = ModelConfig(vocab_size=32, d_model=16, layers=(LAYER,) * 7)


def operate(config, *steps):
    """Applies (function, *arguments) on shapes alone."""
    params = param_shapes(config)
    for function, *arguments in steps:
        config, params, *_ = function(config, params, *arguments)
    return config


BARE = operate(TEACHER, (surgery.remove_attention, [1, 2, 3, 4, 5]))
FUSED = operate(BARE, (surgery.fuse_ffns, [(1, 2, 3), (4, 5)]))


def test_a_fused_layer_stands_for_the_last_of_its_run():
    _, report = surgery.plan_fusion(BARE, [(1, 2, 3), (4, 5)])
    assert layer_map_of(report) == (0, 3, 5, 6)
    assert derive_layer_map(TEACHER, FUSED) == (0, 3, 5, 6)


def test_fusions_one_after_the_other():
    once, first = surgery.plan_fusion(BARE, [(2, 3)])
    _, second = surgery.plan_fusion(once, [(1, 2, 3)])
    assert layer_map_of(first) == (0, 1, 3, 4, 5, 6)
    assert layer_map_of(first, second) == (0, 4, 5, 6)
    with pytest.raises(ValueError, match="report 1 starts from 6 layers, the one before"):
        layer_map_of(surgery.plan_fusion(BARE, [(1, 2, 3, 4)])[1], second)
    with pytest.raises(ValueError, match="plan_fusion"):
        layer_map_of()


def test_without_fusion_layers_keep_their_numbers():
    removed = operate(BARE, (surgery.remove_ffn, [2, 6]))
    assert derive_layer_map(TEACHER, removed) == tuple(range(7))


def test_what_pruning_hides_has_to_be_said():
    keep = {1: 48}
    pruned = operate(FUSED, (lambda c, p: surgery.prune_ffn(c, p, [1], keep=keep),))
    with pytest.raises(ValueError, match="in no way; pass the teacher layer"):
        derive_layer_map(TEACHER, pruned)
    # A layer with neither part may have gone with the one before it or with the one after.
    empty = LayerConfig(attention=None, ffn=None)
    bare = dataclasses.replace(LAYER, attention=None)
    teacher, student = (TEACHER.replace(layers=x) for x in ((bare, empty, bare), (bare, bare)))
    with pytest.raises(ValueError, match=r"more than one way \(for example \[0, 2\] and \[1, 2\]"):
        derive_layer_map(teacher, student)


@pytest.mark.parametrize(
    ("layer_map", "message"),
    [
        ((0, 3, 5), "an entry for each of the student's 4 layers, got 3"),
        ((0, 3, 5, 7), "teacher layers 0 to 6, or None, got 7"),
        ((0, 3, -1, 6), "teacher layers 0 to 6, or None, got -1"),
        ((0, 3, 3, 6), "must ascend"),
        ((0, 2, 3, 5), "must end with the teacher's last layer 6, which the head reads, got 5"),
        ((0, 2, 3, None), "got None"),
        ((0, 3, 5.0, 6), "got 5.0"),
    ],
)
def test_maps_that_do_not_fit(layer_map, message):
    with pytest.raises(ValueError, match=message):
        check_layer_map(TEACHER, FUSED, layer_map)


def test_maps_that_fit():
    assert check_layer_map(TEACHER, FUSED, [0, None, 5, 6]) == (0, None, 5, 6)
