"""Windows, and the ways to make one shallower."""

import numpy as np
import pytest

from sparsejax import apply, surgery
from sparsejax.studies.fusing import best_window, changes, cut_into, reverse


def test_the_window_of_least_loss():
    assert best_window([5, 1, 1, 4, 0, 0.5, 9], 2) == (4, 5)
    assert best_window([1, 1, 1], 2) == (0, 1)
    with pytest.raises(ValueError, match="length must be from 1 to the 3 layers, got 4"):
        best_window([1, 1, 1], 4)


def test_groups():
    assert cut_into(range(3, 10), 3) == ((3, 4, 5), (6, 7, 8))
    assert cut_into(range(5), 3) == ((0, 1, 2), (3, 4))


def test_reversed_layers_stand_in_each_others_place(model):
    config, params = model
    way = reverse(config, params, "r", [(1, 2)])
    assert way.params["layer_1"] is params["layer_2"] and way.params["layer_2"] is params["layer_1"]
    assert way.params["layer_0"] is params["layer_0"] and (way.saved, way.beside) == (0, 1)
    with pytest.raises(ValueError, match=r"layers \[0, 1\] differ"):
        reverse(config, params, "r", [(0, 1)])


def test_every_change_is_what_its_name_says(model):
    config, params = surgery.remove_attention(*model, 3)
    tokens = np.random.default_rng(0).integers(0, 48, (2, 8))
    ways = {
        (w.name, w.family): w
        for w in changes(config, params, (1, 2, 3), {1: 0.5, 2: 0.1, 3: 0.3}, (2, 8))
    }
    assert list(ways) == [
        ("fuse 2", "fuse"),
        ("fuse 2", "fuse, last layer in"),
        ("fuse 2", "fuse, own norms"),
        ("reverse 2", "reverse"),
        ("fuse all", "fuse"),
        ("fuse all", "fuse, own norms"),
        ("reverse all", "reverse"),
        ("remove 1", "remove"),
        ("remove 2", "remove"),
    ]
    assert [w.where for w in ways.values()] == [
        "1-2", "2-3", "1-2", "1-2", "1-3", "1-3", "1-3", "2", "2 3",
    ]  # fmt: skip
    assert [w.saved for w in ways.values()] == [1, 1, 1, 0, 2, 2, 0, 1, 2]
    whole = ways["fuse all", "fuse, own norms"]
    assert whole.layer_map == (0, 3) and whole.config.layers[1].ffn.d_ff == 96
    side_by_side = surgery.parallelize_blocks(config, params, [(1, 2, 3)])
    wanted = apply(*side_by_side, tokens)
    np.testing.assert_allclose(apply(whole.config, whole.params, tokens), wanted, atol=1e-4)
    gone = ways["remove 1", "remove"]
    assert gone.config.ffn_layers == (0, 1, 3)
