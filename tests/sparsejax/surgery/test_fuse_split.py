"""One feed-forward layer taken apart into parallel ones: fusing undone."""

import re

import jax
import numpy as np
import pytest

from sparsejax import param_shapes
from sparsejax.params import flatten
from sparsejax.surgery import fuse_ffns, split_ffn
from tests.sparsejax.surgery.test_fuse import (
    EMPTY,
    MIXED,
    WHOLE,
    apply,
    bare,
    model,
    parallel,
    same_bits,
)
from tests.sparsejax.test_model import close, random_params


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
