"""How leaves are computed: on a mesh without gathering, in little memory, old ones freed."""

import contextlib
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax import MeshConfig, make_mesh, param_shapes, presets
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.params import flatten
from sparsejax.sharding import tree_shardings
from sparsejax.surgery import (
    fuse_ffns,
    leaves,
    permute_neurons,
    prune_ffn,
    reduce_kv_heads,
    remove_attention,
    split_ffn,
)
from tests.sparsejax.test_model import random_params

D = 64
ATTENTION = AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=4, qkv_bias=True)
CONFIG = ModelConfig(
    vocab_size=64,
    d_model=D,
    layers=(
        LayerConfig(attention=ATTENTION, ffn=FFNConfig(d_ff=48)),
        LayerConfig(attention=None, ffn=FFNConfig(d_ff=32)),
        LayerConfig(attention=None, ffn=FFNConfig(d_ff=96, gate_bias=True)),
        LayerConfig(attention=None, ffn=FFNConfig(d_ff=40)),
    ),
    dtype="float32",
)
RUN = [(1, 2, 3)]
ORDER = np.random.default_rng(5).permutation(96)
OPERATIONS = {
    "fuse": lambda params, **k: fuse_ffns(CONFIG, params, RUN, **k),
    "fold": lambda params, **k: fuse_ffns(CONFIG, params, RUN, "fold", **k),
    "split": lambda params, **k: split_ffn(CONFIG, params, 2, [8, 64, 24], **k),
    "prune": lambda params, **k: prune_ffn(CONFIG, params, 2, keep=ORDER[:40], **k)[:2],
    "permute": lambda params, **k: permute_neurons(CONFIG, params, 2, ORDER, **k),
    "pool heads": lambda params, **k: reduce_kv_heads(CONFIG, params, 0, 4, **k),
}
operations = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
MESHES = [MeshConfig(2, 2, 2), MeshConfig(1, 2, 4)]


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


def place(params, mesh):
    return jax.device_put(params, tree_shardings(mesh, params))


def collectives(text):
    """(kind, shape) of everything that a compiled program's collectives return."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return [
        (kind, tuple(int(n) for n in dims.split(",") if n))
        for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
        for dims in re.findall(r"\w+\[([\d,]*)\]", result)
    ]


@operations
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_on_a_mesh_every_bit_and_every_split_stays(params, operation, sizes):
    mesh = make_mesh(sizes)
    new_config, want = operation(params)
    _, got = operation(place(params, mesh))
    for path, leaf in flatten(got).items():
        np.testing.assert_array_equal(leaf, flatten(want)[path], err_msg=path)
        split = flatten(tree_shardings(mesh, param_shapes(new_config)))[path]
        assert isinstance(leaf.sharding, NamedSharding)
        assert leaf.sharding.is_equivalent_to(split, leaf.ndim), path
        # Each device holds its share of everything but the norms.
        assert leaf.sharding.is_fully_replicated == path.endswith("scale"), path


@operations
def test_shapes_keep_their_splits(params, operation):
    mesh = make_mesh(MESHES[1])
    shardings = tree_shardings(mesh, params)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings
    )
    new_config, planned = operation(shapes)
    assert planned == jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        param_shapes(new_config),
        tree_shardings(mesh, param_shapes(new_config)),
    )


def programs(monkeypatch, operation, params):
    """The compiled programs that an operation runs on arrays, with its peak beside arguments."""
    seen = []
    compiled = leaves._compiled

    def recording(*key):
        program = compiled(*key)

        def call(sources, operands):
            seen.append(program.lower(sources, operands).compile())
            return program(sources, operands)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(leaves, "_compiled", recording)
        operation(params)
    return seen


@pytest.mark.parametrize("name", ["fold", "split", "prune", "pool heads"])
def test_no_program_gathers_a_matrix(params, name, monkeypatch):
    seen = programs(monkeypatch, OPERATIONS[name], place(params, make_mesh(MESHES[1])))
    found = [c for program in seen for c in collectives(program.as_text())]
    for kind, shape in found:
        if kind in ("all-gather", "all-reduce", "reduce-scatter"):
            assert np.prod(shape) <= 168, (kind, shape)  # vectors of neurons, no matrix
        else:
            # Blocks of what one device holds, of eight.
            assert np.prod(shape) <= 168 * D // 8, (kind, shape)
    if name != "pool heads":
        assert any(kind == "all-to-all" for kind, _ in found)  # the parser sees the programs
    for program in seen:
        memory = program.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        assert memory.temp_size_in_bytes <= 2 * held + 1024


@pytest.mark.parametrize("name", ["fuse", "prune", "fuse without set_mesh"])
def test_under_jit_nothing_is_gathered_either(params, name):
    """A tracer does not say how it is split; under a mesh the sharding rules do."""
    mesh = make_mesh(MESHES[1])
    placed = place(params, mesh)
    name, _, without = name.partition(" ")
    new_config, want = OPERATIONS[name](params)
    with contextlib.nullcontext() if without else jax.set_mesh(mesh):
        program = jax.jit(lambda p: OPERATIONS[name](p)[1]).lower(placed).compile()
    for kind, shape in collectives(program.as_text()):
        if kind in ("all-gather", "all-reduce", "reduce-scatter"):
            assert np.prod(shape) <= 168, (kind, shape)
    splits = flatten(tree_shardings(mesh, param_shapes(new_config)))
    for path, leaf in flatten(program(placed)).items():
        np.testing.assert_array_equal(leaf, flatten(want)[path], err_msg=path)
        assert leaf.sharding.is_equivalent_to(splits[path], leaf.ndim), path


def test_a_layout_of_the_callers_own(params):
    """Matrices split over columns alone, or over two axes at once, stay so."""
    mesh = make_mesh(MESHES[0])
    for spec in (P(None, "tensor"), P(("fsdp", "tensor")), P("tensor", None)):
        own = NamedSharding(mesh, spec)
        placed = jax.tree.map(lambda x: x, params)
        for i in (1, 2, 3):
            ffn = placed[f"layer_{i}"]["ffn"]
            ffn |= {n: jax.device_put(ffn[n], own) for n in ("gate", "up", "down")}
        _, fused = OPERATIONS["fuse"](placed)
        up = fused["layer_1"]["ffn"]["up"]
        assert up.sharding.is_equivalent_to(own, 2)
        np.testing.assert_array_equal(up, OPERATIONS["fuse"](params)[1]["layer_1"]["ffn"]["up"])


def test_widths_that_do_not_divide_the_mesh(params):
    placed = place(params, make_mesh(MESHES[1]))
    end = r"which does not divide over the mesh axis 'tensor' = 4 devices that splits it; use a m"
    with pytest.raises(
        ValueError, match=rf"widths\[1\] = 62 gives layer_2/ffn/\w+ a dimension 0 of size 62, {end}"
    ):
        split_ffn(CONFIG, placed, 2, [8, 62, 26])
    with pytest.raises(
        ValueError, match=rf"keep \(30 neurons\) gives layer_2/ffn/\w+ .* 30, {end}"
    ):
        prune_ffn(CONFIG, placed, 2, keep=range(30))
    with pytest.raises(
        ValueError, match=rf"num_kv_heads = 2 gives layer_0/attn/k a dimension 1 of size 2, {end}"
    ):
        reduce_kv_heads(CONFIG, placed, 0, 2)
    with jax.set_mesh(make_mesh(MESHES[1])), pytest.raises(ValueError, match="of size 30"):
        jax.jit(lambda p: prune_ffn(CONFIG, p, 2, keep=range(30))[1])(placed)
    # Where nothing is split, any width goes.
    assert prune_ffn(CONFIG, params, 2, keep=range(31))[0].layers[2].ffn.d_ff == 31


# ---- memory -------------------------------------------------------------------------------------


def live_bytes():
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def watched(operation, params, monkeypatch, **options):
    """(most bytes alive at a time, bytes of the largest result of one step, new tree)."""
    alive, made = [], []
    run = leaves.run

    def watching(*args, **kwargs):
        result = run(*args, **kwargs)
        alive.append(live_bytes())
        made.append(sum(x.nbytes for x in jax.tree.leaves(result)))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(leaves, "run", watching)
        _, new = operation(params, **options)
    return max(alive), max(made), new


@operations
def test_donated_leaves_make_room_one_by_one(operation, monkeypatch):
    params = random_params(CONFIG)
    old = jax.tree.leaves(params)
    tree = sum(leaf.nbytes for leaf in old)
    gc.collect()
    others = live_bytes() - tree
    peak, _, new = watched(operation, params, monkeypatch)
    made = [x for x in jax.tree.leaves(new) if all(x is not y for y in old)]
    assert peak - others == tree + sum(x.nbytes for x in made)  # everything old, everything new

    want = jax.tree.map(lambda x: np.array(x, copy=True), new)
    del new, made
    peak, largest, new = watched(operation, params, monkeypatch, donate=True)
    vectors = 5 * D * 4  # norm scales, which go last
    assert tree < peak - others <= tree + largest + vectors
    # The old tree still exists here, and only the new one takes memory.
    assert live_bytes() - others == sum(leaf.nbytes for leaf in jax.tree.leaves(new))
    for path, leaf in flatten(new).items():
        np.testing.assert_array_equal(leaf, flatten(want)[path], err_msg=path)


def test_one_device_needs_no_room_but_the_result(params, monkeypatch):
    for name in ("fuse", "fold", "prune"):
        for program in programs(monkeypatch, OPERATIONS[name], params):
            assert program.memory_analysis().temp_size_in_bytes <= 1024


def test_what_is_donated():
    params = random_params(CONFIG)
    twin = params["layer_1"]["ffn"]["up"]
    params["layer_0"]["ffn"]["up"] = jnp.concatenate([twin, twin[:16]])
    params["layer_3"]["ffn"]["down"] = params["layer_3"]["ffn"]["up"]
    config, fused = fuse_ffns(CONFIG, params, RUN, donate=True)
    gone = {path for path, leaf in flatten(params).items() if leaf.is_deleted()}
    # Neither what the new tree shares, nor a leaf that lies at two paths.
    assert gone == {
        *(f"layer_{i}/ffn/{n}" for i in (1, 2) for n in ("gate", "up", "down")),
        "layer_3/ffn/gate",
        "layer_2/ffn/gate_bias",
        "layer_1/ffn_norm/scale",
        "layer_2/ffn_norm/scale",
    }
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(fused))
    with pytest.raises(ValueError, match="donate=True works on arrays, and params are being tr"):
        jax.jit(lambda p: permute_neurons(config, p, 0, range(48), donate=True)[1])(fused)
    shapes = param_shapes(CONFIG)
    assert fuse_ffns(CONFIG, shapes, RUN, donate=True)[0] == config


def test_nothing_is_freed_when_a_request_is_refused():
    params = random_params(CONFIG)
    for call in (
        lambda: fuse_ffns(CONFIG, params, [(1, 2), (0, 1)], donate=True),
        lambda: split_ffn(CONFIG, params, 1, [16, 17], donate=True),
        lambda: prune_ffn(CONFIG, params, [1, 2], keep={1: 8, 2: 97}, scores={}, donate=True),
        lambda: reduce_kv_heads(CONFIG, params, [0, 1], 4, donate=True),
    ):
        with pytest.raises(ValueError, match=r"_ffn|reduce_kv"):
            call()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_a_split_405b_is_planned_without_memory():
    mesh, config = make_mesh(MESHES[1]), presets.get("llama-3.1-405b")
    shapes = param_shapes(config)
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        tree_shardings(mesh, shapes),
    )
    before = live_bytes()
    config, placed = remove_attention(config, placed, range(66, 116))
    config, placed = fuse_ffns(config, placed, [range(66, 115)])
    config, placed, _ = prune_ffn(config, placed, [0, 1], keep=0.1, multiple=256)
    assert live_bytes() == before
    assert placed["layer_66"]["ffn"]["up"].shape == (49 * 53248, 16384)
    assert placed["layer_0"]["ffn"]["down"].shape == (5376, 16384)
    for i in (0, 66):
        assert placed[f"layer_{i}"]["ffn"]["up"].sharding.spec == P("tensor", "fsdp")
