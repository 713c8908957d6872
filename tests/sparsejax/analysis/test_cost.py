"""The cost model against counted parameters, caches, compiled programs and published figures."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from sparsejax import MeshConfig, make_mesh, param_shapes, params, presets, surgery
from sparsejax.analysis import Choice, cost
from sparsejax.attention import init_cache
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig
from sparsejax.model import flops_per_token, forward
from sparsejax.sharding import tree_shardings
from tests.sparsejax.test_model import CONFIGS, EMPTY

# Round numbers, so that times can be written down.
PLAIN = cost.Device(
    name="plain",
    flops={"bfloat16": 1e12, "float32": 1e12},
    memory=1e9,
    memory_bandwidth=1e9,
    link_bandwidth=1e8,
    bandwidth_share=0.5,
    compute_share=0.25,
    step_latency=1e-3,
    allreduce_base=2e-3,
    allreduce_hop=1e-4,
)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("tensor", [1, 2])
def test_counts(config, tensor):
    got = cost.estimate(config, batch=3, context=40, tensor=tensor)
    count = params.count(param_shapes(config))
    cache = jax.eval_shape(lambda: init_cache(config, 3, 40))
    cache_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(cache))
    assert got.parameters == count and got.parameter_bytes == 4 * count
    assert got.kv_cache == cache_bytes
    assert got.flops_per_token == pytest.approx(flops_per_token(config, 2 * 40) / 3, rel=1e-12)
    if tensor == 1:
        assert got.memory == 4 * count + cache_bytes and got.all_reduces == 0
    else:
        parts = len(config.attention_layers) + len(config.ffn_layers)
        assert got.all_reduces == parts
    half = cost.estimate(config, batch=3, context=40, dtype="bfloat16", cache_dtype="float8")
    assert half.parameter_bytes == 2 * count and half.kv_cache == cache_bytes / 4


ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
LAYER = LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=64, activation="silu"))
CONFIG = presets.tiny().replace(
    layers=(LAYER, dataclasses.replace(LAYER, attention=None), dataclasses.replace(LAYER, ffn=None))
)


def test_seconds_by_hand():
    config = CONFIG.replace(layers=(LAYER,), d_model=32, vocab_size=100)
    got = cost.estimate(config, device=PLAIN, batch=2, context=10, prompt=5, tensor=4)
    attention, ffn = 32 + 2 * (4 + 2) * 8 * 32, 32 + 3 * 64 * 32
    # One key and one value head per device (two heads, four devices), float32.
    one = 2 * 8 * 4
    read = attention * 4 / 4 + 2 * 10 * one + 2 * one
    reduce = 2e-3 + 6e-4 + 6 / 4 * (2 * 32 * 4) / 1e8
    parts = read / 0.5e9 + (ffn * 4 / 4) / 0.5e9 + 2 * (1e-3 + reduce)
    head = (100 * 32 * 4 / 4 + 2 * 32 * 4) / 0.5e9 + 1e-3
    assert got.latency == pytest.approx(parts + head, rel=1e-12)
    assert got.memory == (attention + ffn + 100 * 32 + 32) * 4 / 4 + 2 * 10 * one
    assert got.bytes_per_step == pytest.approx(read + ffn + 100 * 32 + 2 * 32 * 4)
    # Reading prompts is bound by products once there are many: a device of little compute.
    slow = dataclasses.replace(PLAIN, flops={"float32": 1e6})
    got = cost.estimate(config, device=slow, batch=2, context=10, prompt=5)
    matmuls = 2 * (2 * 6 * 8 * 32 + 3 * 64 * 32)
    attend = 2 * 5 * 4 * 8  # causal, half of the square: 4 T H K / 2
    seconds = (matmuls + attend) * 10 / 0.25e6 + 2 * 100 * 32 * 2 / 0.25e6 + 3e-3
    assert got.prefill_latency == pytest.approx(seconds, rel=1e-12)


def test_all_reduces_of_the_compiled_program():
    mesh = make_mesh(MeshConfig(data=1, tensor=2), devices=jax.devices()[:2])
    shapes = jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
        param_shapes(CONFIG),
        tree_shardings(mesh, param_shapes(CONFIG)),
    )
    with jax.set_mesh(mesh):
        hidden = jax.jit(lambda p, t: forward(CONFIG, p, t).hidden)
        text = hidden.lower(shapes, jax.ShapeDtypeStruct((1, 8), jnp.int32)).compile().as_text()
    found = len(re.findall(r" = \S+ all-reduce(?:-start)?\(", text))
    # And one of the embedding, whose rows are split.
    assert found == cost.estimate(CONFIG, tensor=2).all_reduces + 1 == 5


def test_layers_chosen_one_by_one_add_up():
    grid = {
        0: [Choice(True, 64), Choice(False, 64), Choice(True, 0), Choice(False, 16)],
        1: [Choice(False, 64), Choice(False, 0)],
        2: [Choice(True, 0), Choice(False, 0)],
    }
    setting = dict(device="h200", batch=4, context=100, prompt=50, tensor=2)
    costs = cost.layer_costs(CONFIG, grid, **setting)
    shapes = param_shapes(CONFIG)
    narrow, fewer, _ = surgery.prune_ffn(CONFIG, shapes, 0, keep=16)
    bare, _ = surgery.remove_attention(narrow, fewer, [0, 2])
    for config, choices in (
        (CONFIG, (Choice(True, 64), Choice(False, 64), Choice(True, 0))),
        (bare, (Choice(False, 16), Choice(False, 64), Choice(False, 0))),
        (CONFIG.replace(layers=(EMPTY,) * 3), (Choice(False, 0),) * 3),
    ):
        grid_of = {i: [c] for i, c in enumerate(choices)}
        costs = cost.layer_costs(CONFIG, {i: [*grid[i], *grid_of[i]] for i in grid}, **setting)
        want = cost.estimate(config, **setting)
        for name in cost.LIMITS:
            assert costs.total(name, choices) == pytest.approx(getattr(want, name), rel=1e-12)


# ---- Llama 3.1 405B and what was made of it ------------------------------------------------------

WITHOUT_ATTENTION = {*range(66, 116), *range(30, 42)}
GROUPS = [range(66, 74), range(74, 86), range(86, 101), range(101, 115)]
PARENT = presets.get("llama-3.1-405b")


def nemotron():
    """(before fusion, after): 64 of 126 attentions, 253B parameters, four fused groups.

    Which attentions are gone besides layers 66 to 115, and the width of each layer, are not all
    published. The model's cost depends on their sums only: 12 more attentions, and a width that
    gives 253B parameters.
    """
    layers = [
        dataclasses.replace(
            layer,
            attention=None if i in WITHOUT_ATTENTION else layer.attention,
            ffn=dataclasses.replace(layer.ffn, d_ff=34304),
        )
        for i, layer in enumerate(PARENT.layers)
    ]
    before = PARENT.replace(layers=tuple(layers))
    return before, surgery.plan_fusion(before, GROUPS)[0]


def test_the_published_change():
    before, after = nemotron()
    setting = dict(device="h100", tensor=8, dtype="float8", context=4096)
    parent, unfused, fused = (cost.estimate(c, **setting) for c in (PARENT, before, after))
    assert len(PARENT.attention_layers) == 126 and len(after.attention_layers) == 64
    assert len(after.ffn_layers) == 81
    assert (parent.all_reduces, unfused.all_reduces, fused.all_reduces) == (252, 190, 145)
    assert parent.parameters == pytest.approx(405.85e9, rel=1e-4)
    assert fused.parameters == pytest.approx(253e9, rel=2e-3)
    assert fused.kv_cache / parent.kv_cache == 64 / 126
    assert fused.kv_cache == 1024 * 2**20  # at 4096 positions of 16 bits
    # Published: 41.44, 63.38 and 70.92 tokens/s on eight H100 with FP8 weights, one user.
    for got, tokens_per_s in ((parent, 41.44), (unfused, 63.38), (fused, 70.92)):
        assert got.latency == pytest.approx(1 / tokens_per_s, rel=0.05)
    assert parent.latency / unfused.latency == pytest.approx(63.38 / 41.44, rel=0.05)
    assert parent.latency / fused.latency == pytest.approx(70.92 / 41.44, rel=0.05)


@pytest.mark.parametrize("base", [0.0, 5e-6, 20e-6])
def test_the_published_ratios_do_not_hang_on_one_constant(base):
    device = dataclasses.replace(cost.get_device("h100"), allreduce_base=base)
    before, after = nemotron()
    setting = dict(device=device, tensor=8, dtype="float8", context=512)
    parent, unfused, fused = (cost.estimate(c, **setting) for c in (PARENT, before, after))
    assert parent.latency / unfused.latency == pytest.approx(63.38 / 41.44, rel=0.15)
    assert parent.latency / fused.latency == pytest.approx(70.92 / 41.44, rel=0.15)


def test_a_run_of_ffns_on_two_cards():
    """Measured on two H200, and not what the constants come from: 533 us, fused 351, at batch 1."""
    ffn = LayerConfig(attention=None, ffn=FFNConfig(d_ff=14336, activation="silu"))
    config = PARENT.replace(d_model=4096, layers=(ffn,) * 8)
    fused, _ = surgery.plan_fusion(config, [range(8)])
    empty = cost.estimate(config.replace(layers=()), tensor=2).latency
    for model, seconds in ((config, 533e-6), (fused, 351e-6)):
        got = cost.estimate(model, tensor=2).latency - empty
        assert got == pytest.approx(seconds, rel=0.07)


def test_wrong_requests():
    for kwargs, message in (
        ({"device": "h20"}, "unknown device 'h20' (did you mean 'h200'?); known: a100, h100"),
        ({"batch": 0}, "batch must be a positive integer, got 0"),
        ({"context": 2.5}, "context must be a positive integer, got 2.5"),
        ({"tensor": True}, "tensor must be a positive integer, got True"),
        ({"prompt": -1}, "prompt must be a positive integer, got -1"),
        ({"dtype": "int3"}, "dtype must be one of ['float32', 'bfloat16', 'float16', 'float8']"),
        ({"cache_dtype": "fp8"}, "cache_dtype must be one of"),
        ({"device": "a100", "dtype": "float8"}, "a100 has no rate for products in float8; it has"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            cost.estimate(CONFIG, **kwargs)
    now = {i: [Choice(True, 64)] for i in range(3)}
    with pytest.raises(ValueError, match=re.escape("layer 1 is Choice(attention=False, d_ff=64)")):
        cost.layer_costs(CONFIG, now)
    with pytest.raises(ValueError, match=re.escape("keys 0 to 2, one for each layer, got [0, 1]")):
        cost.layer_costs(CONFIG, {0: [], 1: []})
    with pytest.raises(ValueError, match="Device: memory must be finite, got nan"):
        dataclasses.replace(PLAIN, memory=float("nan"))
