"""Buckets and the table of measured launch settings; tiles are in test_lowering.py."""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels.gated_ffn import config


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1, 16, 33), (1, 16, 32)), ((16384, 2048, 5632), (16384, 2048, 4096)),
     ((12000, 2560, 6000), (16384, 2048, 8192)), ((11000, 3000, 97), (8192, 4096, 128))],
)  # fmt: skip
def test_sizes_round_to_the_nearest_power_of_two(sizes, expected):
    key = tuning.bucket("NVIDIA H200", jnp.bfloat16, *sizes)
    assert key == ("NVIDIA H200", "bfloat16", *expected)


def test_the_nearest_token_count_of_the_same_layer_counts():
    def key(tokens, width=2048, device="a"):
        return tuning.Bucket(device, "bfloat16", tokens, width, 4096)

    table = {key(1024): {"warps": 1}, key(16384): {"warps": 2}}
    assert tuning.measured(table, key(2048)) == {"warps": 1}
    assert tuning.measured(table, key(65536)) == {"warps": 2}
    assert tuning.measured(table, key(1024, width=1024)) == {}
    assert tuning.measured(table, key(1024, device="b")) == {}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"choice": "bogus"}, "choice must be one of ['auto', 'sparse', 'hot', 'dense'], got 'bog"),
        ({"residuals": "none"}, "residuals must be one of ['compact', 'full'], got 'none'"),
        ({"list_width": -1}, "list_width must be at least 0, got -1"),
        ({"list_chunk": 48}, "list_chunk must be a power of two, got 48"),
        ({"list_chunk": 16}, "list_chunk must be at least 32, got 16"),
        ({"walk_warps": 3}, "walk_warps must be a power of two, got 3"),
        ({"grad_segment": 0}, "grad_segment must be at least 1, got 0"),
        ({"grad_columns": 192}, "grad_columns must be a power of two, got 192"),
        ({"grad_columns": 0}, "grad_columns must be at least 1, got 0"),
        ({"grad_weights_warps": 3}, "grad_weights_warps must be a power of two, got 3"),
    ],
)
def test_settings_that_cannot_be_launched(setting, message):
    with pytest.raises(ValueError, match=re.escape(f"FFNConfig: {message}")):
        config.FFNConfig(**setting)


def test_measured_settings_come_before_the_rule():
    h200 = config.default(16384, 2048, 5632, jnp.bfloat16, device="NVIDIA H200")
    for name, value in next(iter(config.MEASURED.values())).items():
        assert getattr(h200, name) == value
    for width in (768, 1024, 2560, 4096, 8192):
        other = config.default(16384, width, 5632, jnp.float32, device="another")
        for name in ("walk_warps", "grad_warps", "grad_hidden_warps"):
            warps = getattr(other, name)
            assert 1 <= warps <= 16
            assert warps & (warps - 1) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_neurons": 64}, "decode_neurons must be at most 32, got 64"),
        ({"decode_neurons": 24}, "decode_neurons must be a power of two, got 24"),
        ({"decode_depth": 48}, "decode_depth must be a power of two, got 48"),
    ],
)
def test_decode_settings_that_give_wrong_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        config.FFNConfig(**changes)


@pytest.mark.parametrize("side", ["rows", "columns", "depth", "warps"])
def test_sides_of_a_tile_are_powers_of_two(side):
    with pytest.raises(ValueError, match=f"MatmulTile: {side} must be a power of two, got 48"):
        dataclasses.replace(tuning.HOPPER_TILE, **{side: 48})
