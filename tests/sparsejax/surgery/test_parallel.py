"""Windows of whole layers that read one input."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import param_shapes
from sparsejax.surgery import parallelize_blocks
from tests.sparsejax.surgery.test_attention import CONFIG, LAYER, TOKENS
from tests.sparsejax.test_model import (
    close,
    np_attention,
    np_ffn,
    np_model,
    np_norm,
    random_params,
)

DEEP = CONFIG.replace(layers=(LAYER,) * 6)


def np_layer(part, x):
    """x + attention(norm(x)), then + ffn(norm(.))."""
    normed = np_norm(x, part["attn_norm"]["scale"], DEEP.norm_eps)
    positions = np.broadcast_to(np.arange(x.shape[1]), x.shape[:2])
    nothing = np.zeros(x.shape[:2])
    x = x + np_attention(LAYER.attention, part["attn"], normed, positions, nothing, DEEP)
    normed = np_norm(x, part["ffn_norm"]["scale"], DEEP.norm_eps)
    return x + np_ffn(LAYER.ffn, part["ffn"], normed)[0]


def test_a_window_adds_the_deltas_of_its_layers():
    params = random_params(DEEP)
    config, same = parallelize_blocks(DEEP, params, [range(1, 4), (4, 5)])
    flags = [layer.parallel_with_previous for layer in config.layers]
    assert flags == [False, False, True, True, False, True]
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, same, params))

    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x = p["embed"]["embedding"][TOKENS]
    for window in ((0,), (1, 2, 3), (4, 5)):
        x = x + sum(np_layer(p[f"layer_{k}"], x) - x for k in window)
    want = np_norm(x, p["final_norm"]["scale"], DEEP.norm_eps) @ p["embed"]["embedding"].T
    with jax.default_matmul_precision("highest"):
        close(sparsejax.apply(config, same, jnp.asarray(TOKENS)), want)
    assert np.abs(np_model(DEEP, params, TOKENS)[0] - want).max() > 0.1


def test_a_window_joins_the_run_it_touches():
    config = DEEP.replace(
        layers=(LAYER, *[dataclasses.replace(LAYER, parallel_with_previous=True)] * 2, *[LAYER] * 3)
    )
    config, _ = parallelize_blocks(config, param_shapes(config), [(2, 3)])
    assert [layer.parallel_with_previous for layer in config.layers] == [
        *(False, True, True, True),
        *(False, False),
    ]


def test_wrong_windows():
    shapes = param_shapes(DEEP)
    for windows, message in (
        ([(0, 1), (1, 2)], "windows[0] and windows[1] overlap in layer 1"),
        ([(0, 2)], "windows[0] must list consecutive layers in ascending order, got [0, 2]"),
        ([(5,)], "windows[0] must name two consecutive layers or more, got [5]"),
        ([(5, 6)], "windows[0] names layer 6, and the model's layers are 0 to 5"),
    ):
        with pytest.raises(ValueError, match=re.escape("parallelize_blocks: " + message)):
            parallelize_blocks(DEEP, shapes, windows)
