"""`gated_ffn` on a mesh: the sparse engine runs per device, inside `jax.shard_map`.

Nothing partitions a kernel, so where the engine is "triton" this file says how the call is split:
rows of x over the batch axes, neurons (rows of gate, up and down) over `tensor`, one all-reduce of
y. The dense engine stays as it is: the compiler partitions its matmuls.

Every device returns its partial y, l1 and nnz with an axis of its own in front, and they are added
outside, where the compiler makes the all-reduce. The gradient of such a sum is a broadcast; that of
a `psum` inside would be a second all-reduce of dy. What remains is the gradient's own share: dx is
added over `tensor`, weight gradients over the batch axes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import FFNOutput, dispatch, gated_ffn
from pallas_kernels.gated_ffn.api import Residuals, engine
from sparsejax.sharding import BATCH_AXES, constrain
from sparsejax.types import Hidden


@dataclasses.dataclass(frozen=True)
class _Split:
    """How a call is spread: mesh axes of rows, of neurons, and all axes that become manual."""

    batch: tuple[str, ...]
    neurons: tuple[str, ...]
    manual: frozenset[str]


def ffn(
    x: Hidden,
    gate: Array | None,
    up: Array,
    down: Array,
    *,
    gate_bias: Array | None = None,
    activation: str = "relu",
    implementation: str | None = None,
    count_neurons: bool = False,
    residuals: Residuals | None = None,
) -> FFNOutput:
    """`gated_ffn` of x (B, T, D), with `jax.shard_map` around the sparse engine on a mesh.

    Without a mesh, inside another `shard_map`, or with the dense engine it is `gated_ffn` itself.
    On a mesh (`jax.set_mesh`) each batch axis, in the order data, fsdp, is used if it divides the
    rows B together with those before it, and `tensor` if it divides the neurons F. Devices along an
    axis that is not used compute the same rows (or neurons): slower, never different.

    Args and errors as `gated_ffn`. `sparse` is float32 here: the share of devices that ran sparse.
    """
    options: dict[str, Any] = {"activation": activation, "count_neurons": count_neurons}
    options["residuals"] = residuals
    split = _split(x, up)
    if split is None or _engine(split, x, gate, up, activation, implementation) != "triton":
        out = _once(x, gate, up, down, gate_bias, implementation=implementation, **options)
        return dataclasses.replace(out, sparse=_share(out))

    def local(x, gate, up, down, gate_bias):
        out = _once(x, gate, up, down, gate_bias, implementation="triton", **options)
        out = dataclasses.replace(out, sparse=_share(out))
        return jax.tree.map(lambda a: a[None], out)

    rows, neurons = split.batch or None, split.neurons or None
    weight = P(neurons)
    specs: dict[str, Any] = {
        "y": P(neurons, rows),
        "l1": P(neurons, rows),
        "nnz": P(neurons, rows),
        "neuron_nnz": P(rows, neurons) if count_neurons else None,
        "sparse": P(split.batch + split.neurons),
    }
    out = jax.shard_map(
        local,
        in_specs=(P(rows), weight, weight, weight, weight),
        out_specs=FFNOutput(**specs),
        axis_names=split.manual,
        # Kernels do not say over which axes their outputs vary. Every axis that is used is in the
        # specs above; along the others all devices hold the same values.
        check_vma=False,
    )(x, gate, up, down, gate_bias)
    # reduce_sum: jnp.sum would add, and send, bfloat16 as float32.
    y, l1, nnz = (lax.reduce_sum(a, (0,)) for a in out)
    fired = out.neuron_nnz
    return FFNOutput(
        y=constrain(y, rows, *[None] * (y.ndim - 1)),
        l1=constrain(l1, rows, *[None] * (l1.ndim - 1)),
        nnz=constrain(nnz, rows, *[None] * (nnz.ndim - 1)),
        neuron_nnz=None if fired is None else constrain(lax.reduce_sum(fired, (0,)), neurons),
        sparse=jnp.mean(out.sparse),
    )


def _once(x, gate, up, down, gate_bias, **options) -> FFNOutput:
    """`gated_ffn`, traced and lowered once for all layers of equal shapes.

    The kernels are worth a second or two of Python per layer; a jitted function inside a program is
    one function that every layer calls.
    """
    return _jitted(x, gate, up, down, gate_bias, interpret=dispatch.interpreting(), **options)


@functools.partial(
    jax.jit,
    static_argnames=("activation", "implementation", "count_neurons", "residuals", "interpret"),
)
def _jitted(x, gate, up, down, gate_bias, *, interpret: bool, **options) -> FFNOutput:
    del interpret  # part of the key under which a trace is kept
    return gated_ffn(x, gate, up, down, gate_bias=gate_bias, **options)


def _split(x: Array, up: Array) -> _Split | None:
    """None where there is nothing to split, or not by us (explicit axes are the caller's)."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = [name for name, kind in kinds.items() if kind == AxisType.Auto]
    if all(mesh.shape[name] == 1 for name in auto):
        return None
    batch: tuple[str, ...] = ()
    for name in BATCH_AXES:
        if name in auto and x.shape[0] % math.prod(mesh.shape[n] for n in (*batch, name)) == 0:
            batch = (*batch, name)
    neurons = ("tensor",) if "tensor" in auto and up.shape[0] % mesh.shape["tensor"] == 0 else ()
    return _Split(batch, neurons, frozenset(auto))


def _engine(split: _Split, x, gate, up, activation: str, implementation: str | None) -> str:
    """The engine for one device's share, as it is seen from inside the `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = mesh.update_axis_types({name: AxisType.Manual for name in split.manual})

    def share(array: Array | None, axes: tuple[str, ...]) -> jax.ShapeDtypeStruct | None:
        if array is None:
            return None
        ways = math.prod(mesh.shape[name] for name in axes)
        return jax.ShapeDtypeStruct((array.shape[0] // ways, *array.shape[1:]), array.dtype)

    x, gate, up = share(x, split.batch), share(gate, split.neurons), share(up, split.neurons)
    with jax.sharding.use_abstract_mesh(manual):
        return engine(x, gate, up, activation, implementation)


def _share(out: FFNOutput) -> Array:
    """1.0 where the call ran sparse, else 0.0."""
    return jnp.float32(1) if out.sparse is None else out.sparse.astype(jnp.float32)
