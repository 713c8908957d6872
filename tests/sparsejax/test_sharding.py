"""Meshes and rules: every leaf has a place, devices hold their share, splits change no value."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from sparsejax import MeshConfig, forward, init_params, make_mesh, param_shapes, presets
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig
from sparsejax.losses import cross_entropy
from sparsejax.model import head_weight
from sparsejax.params import flatten
from sparsejax.sharding import (
    BATCH_AXES,
    RULES,
    batch_sharding,
    check_batch,
    constrain,
    gather_fsdp,
    partition_specs,
    tree_shardings,
)

EVERY_LEAF = ModelConfig(
    vocab_size=64,
    d_model=16,
    layers=(
        LayerConfig(
            attention=AttentionConfig(
                num_heads=8, num_kv_heads=8, head_dim=4, qkv_bias=True, qk_norm=True
            ),
            ffn=FFNConfig(d_ff=32, gate_bias=True),
        ),
    ),
    tie_embeddings=False,
)


# ---- rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets.names())
def test_rules_split_every_matrix_of_every_preset_both_ways(name):
    shapes = param_shapes(presets.get(name))
    specs = partition_specs(shapes)
    assert jax.tree.structure(specs) == jax.tree.structure(shapes)
    for leaf, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(specs), strict=True):
        assert len(leaf.shape) == 1 or {"fsdp", "tensor"} <= set(spec)


@pytest.mark.parametrize("config", [EVERY_LEAF, presets.tiny("nongated")], ids=["all", "tiny"])
def test_optimiser_moments_lie_as_their_parameters_do(config):
    shapes = param_shapes(config)
    specs = flatten(partition_specs(shapes))
    state = jax.eval_shape(optax.adamw(1e-3).init, shapes)
    got = flatten(partition_specs(state))
    for moment in ("mu", "nu"):
        found = {p.split(f"{moment}/")[1]: s for p, s in got.items() if f"{moment}/" in p}
        assert found == specs
    rest = [s for p, s in got.items() if "mu/" not in p and "nu/" not in p]
    assert rest and set(rest) == {P()}  # step counts


def test_every_standard_rule_is_used_by_some_model():
    partition_specs(param_shapes(EVERY_LEAF), list(RULES))


def test_an_unused_rule_of_the_callers_is_an_error():
    rules = [*RULES, (r"mlp/kernel$", P("tensor"))]
    with pytest.raises(ValueError, match=r"sharding rules \['mlp/kernel\$'\] match no leaf"):
        partition_specs(param_shapes(EVERY_LEAF), rules)


def test_a_leaf_without_a_rule_is_an_error():
    with pytest.raises(ValueError, match=r"no sharding rule matches extra/w \(shape \[3, 4\]\)"):
        partition_specs({"extra": {"w": jax.ShapeDtypeStruct((3, 4), jnp.float32)}})
    # Scalars need none.
    assert partition_specs({"count": jax.ShapeDtypeStruct((), jnp.int32)}) == {"count": P()}


def test_a_rule_with_too_many_axes_is_an_error():
    with pytest.raises(ValueError, match=r"'scale\$' gives .* for scale, which has shape \[4\]"):
        partition_specs({"scale": np.zeros(4)}, [("scale$", P("fsdp", "tensor"))])


def test_the_first_matching_rule_wins():
    tree = {"a": {"w": np.zeros((2, 2))}, "b": {"w": np.zeros((2, 2))}}
    specs = partition_specs(tree, [("a/w$", P("fsdp")), ("w$", P("tensor"))])
    assert specs == {"a": {"w": P("fsdp")}, "b": {"w": P("tensor")}}


# ---- mesh sizes ---------------------------------------------------------------------------------


def test_mesh_sizes():
    assert MeshConfig().sizes(8) == (8, 1, 1)
    assert MeshConfig(fsdp=2, tensor=2).sizes(8) == (2, 2, 2)
    assert MeshConfig(2, 4, 1).sizes(8) == (2, 4, 1)
    mesh = make_mesh(MeshConfig(tensor=4))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "tensor": 4}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert dict(make_mesh(devices=jax.devices()[:3]).shape)["data"] == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(data=3), r"data=3 x fsdp=1 x tensor=1 must multiply to .* devices, 8; change"),
        (MeshConfig(fsdp=3), r"data=any x fsdp=3 x tensor=1 must multiply .* 8"),
        (MeshConfig(fsdp=16), r"fsdp=16 .* must multiply .* 8"),
        (MeshConfig(data=0), "mesh sizes must be positive"),
        (MeshConfig(data=-2), "mesh sizes must be positive"),
        (MeshConfig(tensor=0), "mesh sizes must be positive"),
        (MeshConfig(fsdp=-1), "mesh sizes must be positive"),
    ],
)
def test_mesh_sizes_that_do_not_fit(config, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(config)


def test_sizes_that_do_not_divide_are_listed_by_name_and_number():
    config = EVERY_LEAF.replace(vocab_size=62, d_model=20)
    with pytest.raises(ValueError, match="the mesh does not fit the model") as caught:
        tree_shardings(make_mesh(MeshConfig(1, 2, 4)), param_shapes(config))
    assert str(caught.value).splitlines()[1:] == [
        "  vocabulary: embed/embedding: dimension 0 of size 62 does not divide over 'tensor' = 4 "
        "devices, and 1 more like it",
        "--mesh.tensor must divide 2 for this model; the other devices can go to --mesh.fsdp",
    ]


def test_a_mesh_without_the_axis_is_named():
    mesh = Mesh(np.array(jax.devices()), ("model",))
    with pytest.raises(ValueError, match=r"the mesh has axes \['model'\] and no 'tensor'"):
        tree_shardings(mesh, param_shapes(EVERY_LEAF))


def test_batches():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    check_batch(mesh, 12)
    with pytest.raises(
        ValueError, match=r"batch size 8 in 4 microbatches \(.* data x fsdp = 4 .* x 4 microbatches"
    ):
        check_batch(mesh, 8, 4)
    check_batch(mesh, 16, 4)
    with pytest.raises(ValueError, match=r"batch size 6 must be a multiple of data x fsdp = 4"):
        check_batch(mesh, 6)
    batch = jax.device_put(np.arange(32).reshape(8, 4), batch_sharding(mesh))
    assert {s.data.shape for s in batch.addressable_shards} == {(2, 4)}


# ---- hints --------------------------------------------------------------------------------------


def test_constrain_does_nothing_without_a_mesh_and_inside_shard_map():
    x = jnp.ones((8, 4))
    assert constrain(x, BATCH_AXES, "tensor") is x

    def body(x):
        return constrain(x, BATCH_AXES, "tensor") * 2

    mesh = make_mesh(MeshConfig(2, 2, 2))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(body, in_specs=P(BATCH_AXES), out_specs=P(BATCH_AXES))
        assert "sharding_constraint" not in str(jax.make_jaxpr(mapped)(x))
        assert "sharding_constraint" in str(jax.make_jaxpr(body)(x))
        np.testing.assert_array_equal(jax.jit(mapped)(x), 2 * x)
        # Partly manual: the axes that are left still count.
        partly = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        assert "'tensor'" in str(jax.make_jaxpr(partly)(x))
        np.testing.assert_array_equal(jax.jit(partly)(x), 2 * x)


def test_constrain_leaves_out_what_does_not_divide():
    with jax.set_mesh(make_mesh(MeshConfig(2, 2, 2))):
        y = jax.jit(lambda x: constrain(x + 1, BATCH_AXES, None, "tensor"))(jnp.zeros((6, 4, 10)))
        assert {s.data.shape for s in y.addressable_shards} == {(6, 4, 5)}


def test_gather_fsdp_keeps_the_tensor_split():
    mesh = make_mesh(MeshConfig(1, 4, 2))
    shapes = {p: leaf.shape for p, leaf in flatten(param_shapes(EVERY_LEAF)).items()}
    with jax.set_mesh(mesh):
        for path in ("layer_0/attn/q", "layer_0/ffn/down", "lm_head/kernel", "embed/embedding"):
            x = jnp.zeros(shapes[path])
            y = jax.jit(functools.partial(gather_fsdp, path=path))(x)
            assert {s.data.size for s in y.addressable_shards} == {x.size // 2}, path
    assert gather_fsdp(x, "somewhere/else") is x


def test_gather_fsdp_sends_the_dtype_that_is_used_and_keeps_a_share_of_the_gradient():
    mesh = make_mesh(MeshConfig(1, 8, 1))
    weight = jax.ShapeDtypeStruct((96, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((16, 24, 64), jnp.float16)
    shardings = tree_shardings(mesh, {"ffn": {"up": weight}})["ffn"]["up"], batch_sharding(mesh)

    def f(weight, x):
        used = gather_fsdp(weight.astype(jnp.float16), "ffn/up")
        return jnp.sum(jnp.einsum("btd,fd->btf", x, used).astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        grad = jax.jit(jax.grad(f), in_shardings=shardings)
        text = grad.lower(weight, x).compile().as_text()
    (gather,) = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
    assert gather == ("f16", "96,64")
    # Backward the sum comes first, then the cut, then the cast.
    with jax.set_mesh(mesh):
        lines = str(jax.make_jaxpr(jax.grad(f))(weight, x)).splitlines()
    lines = [line for line in lines if re.search(r"f(16|32)\[96,64\] =", line)]
    steps = [re.search(r"= (\w+)", line)[1] for line in lines]
    assert steps[-4:-2] == ["sharding_constraint", "shard_map"]
    assert steps[-2:] == ["sharding_constraint", "convert_element_type"]
    assert steps.count("sharding_constraint") == 4


@pytest.mark.parametrize(("sizes", "laid"), [((2, 2, 2), True), ((4, 1, 2), False)])
def test_a_share_of_a_gradient_is_laid_in_the_order_of_its_parameter(sizes, laid):
    mesh = make_mesh(MeshConfig(*sizes))

    def f(weight):
        return jnp.sum(gather_fsdp(weight, "ffn/up") ** 2)

    weight = jax.random.normal(jax.random.key(0), (96, 64))
    weight = jax.device_put(weight, tree_shardings(mesh, {"ffn": {"up": weight}})["ffn"]["up"])
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(f)).lower(weight)
        got = lowered.compile()(weight)
        pulled = jax.vjp(f, weight)[1]
    np.testing.assert_array_equal(got, 2 * weight)
    np.testing.assert_array_equal(pulled(1.0)[0], 2 * weight)  # the mesh is not in context here
    shares = re.findall(
        r"@LayoutConstraint.*result_layouts = \[dense<\[1, 0\]>.*-> tensor<(\w+)>",
        lowered.as_text(),
    )
    assert shares == (["48x32xf32"] if laid else [])


# ---- the model on eight devices -----------------------------------------------------------------

# Widths that divide eight ways; 20 tokens a row, a number that no parameter has.
CONFIG = presets.tiny().replace(
    d_model=64,
    vocab_size=256,
    layers=tuple(
        dataclasses.replace(
            layer,
            attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=8),
            ffn=FFNConfig(d_ff=96),
        )
        for layer in presets.tiny().layers[:2]
    ),
)
T = 20
TOKENS = np.asarray(jax.random.randint(jax.random.key(0), (8, T + 1), 0, 256))
SPLITS = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4), (4, 1, 2)]


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(1))


def loss(params, tokens):
    out = forward(CONFIG, params, tokens[:, :-1])
    ce = cross_entropy(out.hidden, head_weight(CONFIG, params), tokens[:, 1:], chunk=128)
    return jnp.mean(ce) + 1e-3 * jnp.mean(out.stats.l1)


@pytest.fixture(scope="module")
def single(params):
    return jax.jit(jax.value_and_grad(loss))(params, jnp.asarray(TOKENS))


@functools.cache
def compiled(sizes):
    mesh = make_mesh(MeshConfig(*sizes))
    shapes = param_shapes(CONFIG)
    shardings = tree_shardings(mesh, shapes)
    with jax.set_mesh(mesh):
        grad = jax.jit(
            jax.value_and_grad(loss),
            in_shardings=(shardings, batch_sharding(mesh)),
            out_shardings=(None, shardings),
        )
        tokens = jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32)
        # LLVM's optimisations cost half the compile time and matter to no assertion here.
        program = grad.lower(shapes, tokens).compile({"xla_backend_optimization_level": 0})
        return program, shardings, batch_sharding(mesh)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_splits_change_no_gradient_and_share_the_bytes(params, single, sizes):
    program, shardings, rows = compiled(sizes)
    placed = jax.device_put(params, shardings)
    got, grads = program(placed, jax.device_put(TOKENS, rows))
    np.testing.assert_allclose(got, single[0], rtol=1e-6)
    for path, g in flatten(grads).items():
        want = flatten(single[1])[path]
        np.testing.assert_allclose(g, want, rtol=1e-5, atol=1e-5 * np.abs(want).max(), err_msg=path)

    # Each device holds its share of parameters (and so of gradients and moments): everything but
    # the norms is split fsdp x tensor ways, except that the data axis keeps copies.
    total = norms = 0
    for leaf in jax.tree.leaves(params):
        total += leaf.nbytes
        norms += leaf.nbytes if leaf.ndim == 1 else 0
    ways = sizes[1] * sizes[2]
    for tree in (placed, grads):
        held = dict.fromkeys(jax.devices(), 0)
        for leaf in jax.tree.leaves(tree):
            for shard in leaf.addressable_shards:
                held[shard.device] += shard.data.nbytes
        assert set(held.values()) == {(total - norms) // ways + norms}


def results(kind, text):
    """Shapes that the collectives of one kind return, in a compiled program."""
    found = re.findall(rf"= (.*?) {kind}(?:-start)?\(", text)
    return [
        tuple(int(n) for n in dims.split(",") if n)
        for line in found
        for dims in re.findall(r"\w+\[([\d,]*)\]", line)
    ]


def test_fsdp_gathers_weights_and_never_sums_activations():
    text = compiled((1, 8, 1))[0].as_text()
    gathered = {tuple(sorted(s)) for s in results("all-gather", text)}
    # Whole weights, each gathered: gate, up, down; q; k, v; o; the embedding.
    for shape in ((96, 64), (64, 8, 8), (64, 4, 8), (256, 64)):
        assert tuple(sorted(shape)) in gathered, shape
    sums = results("all-reduce", text) + results("reduce-scatter", text)
    assert any(np.prod(s) >= 64 * 96 // 8 for s in sums)  # gradients; the parser sees the program
    for kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all"):
        for shape in results(kind, text):
            assert not {T, 8 * T} & set(shape), (kind, shape)


def test_tensor_parallel_sums_only_what_it_must():
    text = compiled((1, 2, 4))[0].as_text()
    local = 8 // 2 * T  # tokens of one device
    for shape in results("all-reduce", text):
        if {T, local} & set(shape):  # activations over tensor: (tokens, D) or per token
            assert np.prod(shape) <= local * 64, shape
    for shape in results("all-gather", text):
        assert not {T, local, 8 * T} & set(shape), shape
        # A weight is gathered over fsdp alone: never whole.
        assert np.prod(shape) <= 256 * 64 // 4, shape


def test_an_id_outside_the_vocabulary_gives_nan_on_a_split_vocabulary(params):
    program, shardings, rows = compiled((2, 2, 2))
    tokens = TOKENS.copy()
    tokens[5, 3] = -1
    assert np.isnan(program(jax.device_put(params, shardings), jax.device_put(tokens, rows))[0])
