"""The sparse engine on a mesh, in interpret mode, against the dense engine on one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import UnsupportedError, gated_ffn
from pallas_kernels.testing import assert_close, assert_kernels, ffn_inputs
from sparsejax import MeshConfig, make_mesh
from sparsejax.ffn import ffn
from sparsejax.sharding import AXES

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

MESHES = [MeshConfig(8, 1, 1), MeshConfig(1, 8, 1), MeshConfig(2, 1, 4), MeshConfig(2, 2, 2)]
WEIGHTS = ("gate", "up", "down", "gate_bias")


def inputs_of(rows=8, features=64):
    """x (rows, 2, 32) and weights, neuron-major."""
    inputs = ffn_inputs(2 * rows, 32, features)
    return inputs | {"x": inputs["x"].reshape(rows, 2, 32)}


def loss_of(op):
    """The gradient of a scalar of y and l1 that weighs every entry differently, and the output."""

    def loss(inputs):
        out = op(**inputs)
        weights = jnp.cos(jnp.arange(out.y.size, dtype=jnp.float32)).reshape(out.y.shape)
        return jnp.sum(weights * out.y) + jnp.sum(weights[..., 0] * out.l1), out

    return jax.grad(loss, has_aux=True)


def dense(inputs):
    op = functools.partial(gated_ffn, implementation="xla", count_neurons=True)
    return loss_of(op)(inputs)


def lowered(mesh, inputs, implementation="triton", **options):
    """The compiled loss and gradient on the mesh, and its arguments as the mesh holds them."""
    mesh = make_mesh(mesh)
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    places = {k: P("tensor") for k in inputs}
    places["x"] = P(("data", "fsdp")) if inputs["x"].shape[0] % ways == 0 else P()
    if inputs["up"].shape[0] % mesh.shape["tensor"]:
        places |= {k: P() for k in inputs if k != "x"}
    placed = {k: jax.device_put(v, NamedSharding(mesh, places[k])) for k, v in inputs.items()}
    shardings = {k: v.sharding for k, v in placed.items()}
    with pallas_kernels.interpret(), jax.set_mesh(mesh):
        step = jax.jit(
            loss_of(functools.partial(ffn, implementation=implementation, **options)),
            out_shardings=(shardings, None),
        )
        return step.lower(placed).compile(), placed


def check(compiled, placed, inputs, counted=False):
    gradients, out = compiled(placed)
    expected_gradients, expected = dense(inputs)
    assert_close(out.y, expected.y)
    assert_close(out.l1, expected.l1)
    np.testing.assert_array_equal(out.nnz, expected.nnz)
    assert (out.neuron_nnz is not None) == counted
    if counted:
        np.testing.assert_array_equal(out.neuron_nnz, expected.neuron_nnz)
    for name, gradient in expected_gradients.items():
        assert np.abs(gradient).max() > 0
        assert_close(gradients[name], gradient)
    return out


# Counting neurons takes the kernels of many tokens, which compile slowly here: on one mesh.
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m.data}x{m.fsdp}x{m.tensor}")
def test_values_and_gradients_are_those_of_one_device(mesh):
    inputs = inputs_of()
    compiled, placed = lowered(mesh, inputs, count_neurons=mesh == MESHES[3])
    out = check(compiled, placed, inputs, counted=mesh == MESHES[3])
    assert out.sparse.dtype == jnp.float32
    assert 0 <= out.sparse <= 1
    text = compiled.as_text()
    assert "shard_map" in text
    # One all-reduce of y, one of dx, and weight gradients over the batch axes: nothing is gathered.
    assert not re.search(r" (all-gather|all-to-all|collective-permute)\(", text)


def test_what_does_not_divide_is_computed_by_every_device():
    # One row divides over no axis; two divide over data alone, and 65 neurons over no tensor axis.
    for rows, features, mesh in ((1, 64, MESHES[2]), (2, 65, MESHES[3])):
        inputs = inputs_of(rows, features)
        check(*lowered(mesh, inputs), inputs)


def test_the_dense_engine_stays_the_compilers():
    inputs = inputs_of()
    for implementation in ("xla", None):
        with jax.set_mesh(make_mesh(MESHES[3])):
            op = functools.partial(ffn, implementation=implementation)
            text = jax.jit(lambda i, op=op: op(**i)).lower(inputs)
        assert "shard_map" not in text.as_text()
    out = ffn(**inputs, implementation="xla")
    assert (out.sparse.dtype, out.sparse) == (jnp.float32, 0)


def test_inside_a_shard_map_of_the_callers():
    inputs = inputs_of(features=33)
    mesh = make_mesh()

    def local(x, *weights):
        out = ffn(x, **dict(zip(WEIGHTS, weights, strict=True)), implementation="triton")
        return out.y, out.nnz

    with pallas_kernels.interpret(), jax.set_mesh(mesh):
        f = jax.shard_map(
            local, in_specs=(P("data"), P(), P(), P(), P()), out_specs=P("data"), check_vma=False
        )
        y, nnz = jax.jit(f)(inputs["x"], *[inputs[k] for k in WEIGHTS])
    _, expected = dense(inputs)
    assert_close(y, expected.y)
    np.testing.assert_array_equal(nnz, expected.nnz)


@pytest.mark.parametrize("sizes", [(2, 1, 4), ()], ids=["mesh", "one device"])
def test_layers_of_equal_shapes_share_lowered_kernels(sizes):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(sizes, AXES[: len(sizes)], axis_types=kinds, abstract_device=device)
    x = jax.ShapeDtypeStruct((4, 64, 32), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)

    def text(layers):
        def loss(x, w):
            for _ in range(layers):
                x = x + ffn(x, w, w, w, implementation="triton", count_neurons=True).y
            return jnp.sum(x.astype(jnp.float32))

        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(x, w)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    # The first and the last layer may differ in what their gradients need; no other does.
    three, five = text(3), text(5)
    assert_kernels(three, "gated_ffn_lists", "gated_ffn_walk")
    for name in set(re.findall(r'name = "(gated_ffn\w+)"', three)):
        assert five.count(f'name = "{name}"') == three.count(f'name = "{name}"'), name


def test_an_engine_that_cannot_run_says_why():
    inputs = inputs_of()
    for mesh in MESHES[:1]:
        with (
            jax.set_mesh(make_mesh(mesh)),
            pytest.raises(UnsupportedError, match="it needs a CUDA device"),
        ):
            jax.eval_shape(lambda i: ffn(**i, implementation="triton"), inputs)
    with pytest.raises(UnsupportedError, match="'silu' makes no zeros"):
        ffn(**inputs, activation="silu", implementation="triton")
    with pytest.raises(ValueError, match="implementation must be one of"):
        ffn(**inputs, implementation="cuda")
