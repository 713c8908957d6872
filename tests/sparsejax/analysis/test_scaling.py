"""The model of scaling against compiled programs, byte for byte, and against sums by hand.

`hlo/gpu_*.hlo` are the collectives (and the loops around them) of `make_train_step` of the model
`GPU` with 32 x 256 tokens, as jax 0.10.2 (or 0.11.2, where the name says so) compiles it for eight
H200 without having one: its CUDA plugin, given a description of the card in
`jax.experimental.topologies.get_topology_desc`.
"""

import types
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from sparsejax import MeshConfig, ModelConfig, Options, make_mesh, param_shapes, params, presets
from sparsejax.analysis import cost, scaling
from sparsejax.analysis.collectives import array_bytes, collectives
from sparsejax.analysis.traffic import Term, traffic
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig
from sparsejax.model import flops_per_token
from sparsejax.sharding import AXES, batch_sharding
from sparsejax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from sparsejax.training.state import state_template
from sparsejax.training.step import LossConfig, make_train_step

GOLDEN = Path(__file__).parent / "hlo"


def model(d=64, f=192, head_dim=8, vocab=512, dtype="float32", **attention):
    heads = AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=head_dim, **attention)
    layer = LayerConfig(attention=heads, ffn=FFNConfig(d_ff=f, gate_bias=bool(attention)))
    return ModelConfig(
        vocab_size=vocab, d_model=d, layers=(layer, layer), context_length=256, dtype=dtype
    )


EVERY_LEAF = model(qkv_bias=True, qk_norm=True)
EVERY_LEAF = EVERY_LEAF.replace(
    layers=(
        EVERY_LEAF.layers[0],
        LayerConfig(attention=None, ffn=FFNConfig(d_ff=192, gated=False)),
    ),
    tie_embeddings=False,
)
GPU = model(512, 1024, 32, 4096, "bfloat16")


def step_text(config, mesh, rows, length, remat, accumulate):
    settings = OptimizerConfig()
    optimizer, schedule = make_optimizer(settings, 10), make_schedule(settings, 10)
    options, loss = Options(remat=remat), LossConfig(accumulate=accumulate)
    step = make_train_step(config, optimizer, schedule, loss, options, mesh)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=batch_sharding(mesh))
    batch = {"tokens": ids, "targets": ids}
    with jax.set_mesh(mesh):
        return step.lower(state_template(config, optimizer, mesh), batch).compile().as_text()


@pytest.mark.parametrize(
    ("config", "split", "remat", "accumulate"),
    [
        (model(), (8, 1, 1), "none", 1),
        (model(), (1, 2, 4), "full", 2),
        (EVERY_LEAF, (2, 2, 2), "dots", 1),
    ],
    ids=["data", "microbatches", "all"],
)
def test_every_array_of_the_step_for_host_devices(config, split, remat, accumulate):
    mesh = make_mesh(MeshConfig(*split))
    got = Counter()
    for found in collectives(step_text(config, mesh, 16, 24, remat, accumulate)):
        for dtype, shape in found.arrays:
            if shape:  # scalars are left out
                got[found.kind, found.axes(mesh), array_bytes(dtype, shape)] += found.runs
    want = Counter()
    for term in traffic(config, split, 16, 24, remat=remat, accumulate=accumulate, on="host"):
        want[term.kind, term.axes, term.size] += term.count
    assert got == want


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.hlo")), ids=lambda p: p.stem)
def test_bytes_of_the_step_for_gpus(path):
    _, sizes, *rest = path.stem.split("_")
    split = tuple(int(n) for n in sizes.split("x"))
    accumulate = 2 if "accumulate" in rest else 1
    settings = {"remat": "full" if "full" in rest else "none", "sparse": "sparse" in rest}
    mesh = types.SimpleNamespace(axis_names=AXES, shape=dict(zip(AXES, split, strict=True)))
    got, want = Counter(), Counter()
    for found in collectives(path.read_text()):
        # What is left out: scalars, alone or laid together with other arrays.
        got[found.kind, found.axes(mesh)] += found.size * found.runs
    for term in traffic(GPU, split, 32, 256, accumulate=accumulate, **settings):
        want[term.kind, term.axes] += term.bytes
    assert sum(want.values()) > 2e7
    for key in {*got, *want}:
        assert 0 <= got[key] - want[key] <= 32 * 4, key
    assert all(got[key] == want[key] for key in want if key[0] != "all-reduce")


def test_the_sparse_engine_sends_its_input_gradient_once_in_bfloat16():
    def inputs(**settings):
        terms = traffic(GPU, (1, 1, 8), 8, 16, **settings)
        return sum(t.bytes for t in terms if t.what == "activations")

    array = 8 * 16 * 512 * 2
    # Lookup and head in float32; attention and FFN forward, attention backward; FFN backward.
    assert inputs(sparse=True) == 4 * array + 2 * 3 * array + 2 * array
    assert inputs() == 4 * array + 2 * 3 * array + 2 * 2 * array


# Round numbers, so that times can be written down.
PLAIN = cost.Device(
    name="plain",
    flops={"bfloat16": 1e12, "float32": 1e12},
    memory=1e9,
    memory_bandwidth=1e9,
    link_bandwidth=1e8,
    bandwidth_share=0.5,
    allreduce_base=2e-3,
    allreduce_hop=1e-4,
)
CLUSTER = scaling.Cluster(
    PLAIN, 4, 1e6, network_hop=1e-2, link_share=0.5, busy_link_share=0.2, network_share=0.8
)


@pytest.mark.parametrize(
    ("axes", "split", "want"),
    [
        # Four devices of one host: 3 hops there, 3/4 of the bytes at 5e7/s.
        (("tensor",), (2, 2, 4), 3 * (2e-3 + 3e-4) + 3 / 4 * 3e6 / 5e7),
        # One device of each of 4 hosts: all hops between hosts, one adapter.
        (("data", "fsdp"), (2, 2, 4), 3 * (2e-3 + 3e-2) + 3 / 4 * 3e6 / 0.8e6),
        # Two of each of 2 hosts: one hop between them, two adapters.
        (("fsdp",), (2, 4, 2), 3 * (2e-3 + 2e-4 + 1e-2) + 3 / 4 * 3e6 / 1.6e6),
        (("data",), (1, 4, 1), 0.0),
    ],
)
def test_seconds_of_a_ring_by_hand(axes, split, want):
    term = Term("activations", "all-gather", axes, 1e6, 3)
    assert CLUSTER.seconds(term, split) == pytest.approx(want, rel=1e-12)
    # An all-reduce goes around twice.
    twice = CLUSTER.seconds(Term("activations", "all-reduce", axes, 1e6, 3), split)
    assert twice == pytest.approx(2 * want - 3 * 2e-3 if want else 0.0, rel=1e-12)


def test_weights_share_the_link_with_computation():
    weights, gradients = (
        Term(what, "all-gather", ("fsdp",), 1e6, 1) for what in ("weights", "gradients")
    )
    want = 2e-3 + 3e-4 + 3 / 4 * 1e6 / 2e7
    assert CLUSTER.seconds(weights, (1, 4, 1)) == pytest.approx(want, rel=1e-12)
    assert CLUSTER.seconds(gradients, (1, 4, 1)) == pytest.approx(want, rel=1e-12)
    # Between hosts the network is the narrower one either way.
    between = 2e-3 + 3 * 1e-2 + 3 / 4 * 1e6 / 0.8e6
    assert CLUSTER.seconds(gradients, (1, 4, 4)) == pytest.approx(between, rel=1e-12)


def test_a_step_by_hand():
    config = model()
    got = scaling.estimate(config, (1, 4, 1), 8, 20, cluster=CLUSTER, utilisation=0.5, speedup=2.0)
    count = params.count(param_shapes(config))
    assert got.compute == pytest.approx(flops_per_token(config, 20) * 8 * 20 / 4 / 1e12)
    assert got.optimiser == pytest.approx(28 * count / 4 / 0.5e9)
    assert got.state_bytes == 3 * count and got.gathered_bytes == 4 * count
    layers = count - 64 * 5 - 512 * 64  # all matrices but the embedding, which goes twice
    gathered = 4 * (layers + 2 * 512 * 64)
    transfer = 3 / 4 * gathered / 2e7
    assert got.weights == pytest.approx(transfer + (2e-3 + 3e-4), rel=1e-12)
    assert got.exposed == pytest.approx(
        got.compute + got.optimiser + got.weights + got.gradients + got.statistics
    )
    assert got.hidden == got.optimiser + got.statistics + max(
        got.compute, got.weights + got.gradients
    )
    assert got.tokens_per_s(overlap=False) == 160 / got.exposed


def test_plans_fit_the_model_the_batch_and_the_memory():
    config = presets.get("2b")
    ways = (1, 2, 4, 8)
    want = {(d, f, t) for d in ways for f in ways for t in ways if d * f * t == 8}
    assert set(scaling.splits(config, 8)) == want
    assert all(t <= 4 for *_, t in scaling.splits(config, 64, max_tensor=4))
    steps = scaling.plan(config, 64, 32, 2048)
    assert all(data * fsdp <= 32 for data, fsdp, _ in (s.split for s in steps))
    assert steps == sorted(steps, key=lambda s: s.hidden + s.exposed)
    small = scaling.Cluster(cost.Device(**{**vars(cost.get_device("h200")), "memory": 6e9}))
    assert steps and {s.split for s in scaling.plan(config, 64, 64, 2048, cluster=small)} < {
        s.split for s in scaling.plan(config, 64, 64, 2048)
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 7}, "7 rows must divide over data x fsdp x microbatches = 2"),
        ({"accumulate": 3}, "= 6"),
        ({"utilisation": 0}, "utilisation must be positive, got 0"),
        ({"utilisation": 1.5}, "a share of the device's peak, at most 1, got 1.5"),
        ({"speedup": float("nan")}, "speedup must be positive"),
    ],
)
def test_wrong_settings(changes, message):
    settings = {"rows": 8, "length": 16, **changes}
    with pytest.raises(ValueError, match=message):
        scaling.estimate(model(), (2, 1, 4), **settings)
    with pytest.raises(ValueError, match="on must be 'host' or 'gpu'"):
        traffic(model(), (1, 1, 1), 8, 16, on="tpu")
