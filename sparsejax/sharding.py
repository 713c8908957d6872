"""Meshes and rules: how parameters, optimiser state and batches are spread over devices.

Axes: `data` replicates parameters, `fsdp` also splits each parameter (gathered where it is used),
`tensor` splits heads, neurons and the vocabulary. Rules map parameter paths to axes; they are
applied to the finished tree, after any surgery, so no parameter carries a sharding in its type.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.params import path_string
from sparsejax.sharding_errors import Split, misfit

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

Rules = Sequence[tuple[str, P]]

# Matched with `re.search` against a path's end, first match wins. Optimiser moments end in the
# path of their parameter, so the same rules place them.
RULES: Rules = (
    (r"embed/embedding$", P("tensor", "fsdp")),
    (r"attn/(q|k|v)$", P("fsdp", "tensor", None)),
    (r"attn/o$", P("tensor", None, "fsdp")),
    (r"attn/(q|k|v)_bias$", P("tensor", None)),
    (r"attn/(q|k)_norm$", P(None)),
    (r"ffn/(gate|up|down)$", P("tensor", "fsdp")),
    (r"ffn/gate_bias$", P("tensor")),
    (r"(attn_norm|ffn_norm|final_norm)/scale$", P(None)),
    (r"lm_head/kernel$", P("fsdp", "tensor")),
)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; -1 for `data` takes the devices the other axes leave.

    Attributes:
      data: copies of the model, each with its share of the batch.
      fsdp: ways parameters and optimiser state are split, with the batch split along.
      tensor: ways heads, neurons and the vocabulary are split.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def sizes(self, num_devices: int) -> tuple[int, int, int]:
        """Axis sizes for `num_devices` devices.

        Raises:
          ValueError: the sizes do not multiply to the device count.
        """
        if min(self.fsdp, self.tensor) < 1 or self.data < -1 or self.data == 0:
            raise ValueError(f"mesh sizes must be positive (or data=-1), got {self}")
        fixed = self.fsdp * self.tensor
        data = num_devices // fixed if self.data == -1 else self.data
        if data * fixed != num_devices:
            shown = "any" if self.data == -1 else self.data
            raise ValueError(
                f"mesh data={shown} x fsdp={self.fsdp} x tensor={self.tensor} must multiply "
                f"to the number of devices, {num_devices}; change --mesh.data, --mesh.fsdp or "
                "--mesh.tensor"
            )
        return data, self.fsdp, self.tensor


def make_mesh(config: MeshConfig = MeshConfig(), devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh (data, fsdp, tensor) over `devices` (default: all of all processes)."""
    devices = jax.devices() if devices is None else devices
    sizes = config.sizes(len(devices))
    # The axis type is said openly: jax's default for it has changed between releases.
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def partition_specs(tree: Any, rules: Rules | None = None) -> Any:
    """The `PartitionSpec` of every leaf, by the first rule whose pattern its path matches.

    Args:
      tree: parameters, or any state whose leaf paths end in parameter paths.
      rules: (pattern, spec) pairs; None takes `RULES`. Scalars need no rule (replicated).

    Returns:
      A tree like `tree` of `PartitionSpec`s.

    Raises:
      ValueError: a leaf matches no rule, a spec has more entries than the leaf has dimensions, or
        one of the caller's own rules matches no leaf.
    """
    strict, rules = rules is not None, RULES if rules is None else rules
    used = set()

    def spec(path: tuple[Any, ...], leaf: Any) -> P:
        if not leaf.shape:
            return P()
        name = path_string(path)
        for pattern, found in rules:
            if re.search(pattern, name):
                if len(found) > len(leaf.shape):
                    raise ValueError(
                        f"sharding rule {pattern!r} gives {found} for {name}, which has shape "
                        f"{list(leaf.shape)}"
                    )
                used.add(pattern)
                return found
        raise ValueError(
            f"no sharding rule matches {name} (shape {list(leaf.shape)}); add one to the rules"
        )

    specs = jax.tree_util.tree_map_with_path(spec, tree)
    unused = [pattern for pattern, _ in rules if pattern not in used]
    if strict and unused:
        raise ValueError(f"sharding rules {unused} match no leaf; remove or correct them")
    return specs


def tree_shardings(mesh: Mesh, tree: Any, rules: Rules | None = None) -> Any:
    """The `NamedSharding` of every leaf on `mesh`, checked to divide evenly.

    Raises:
      ValueError: as `partition_specs`, or an axis does not divide a dimension (lists them, and says
        what would fit).
    """
    specs = partition_specs(tree, rules)
    splits: list[Split] = []

    def place(path: tuple[Any, ...], leaf: Any, spec: P) -> NamedSharding:
        for dim, (size, axes) in enumerate(zip(leaf.shape, spec, strict=False)):
            if axes is not None:
                splits.append(Split(path_string(path), dim, size, axes, _ways(mesh, axes)))
        return NamedSharding(mesh, spec)

    shardings = jax.tree_util.tree_map_with_path(place, tree, specs)
    if problem := misfit(splits):
        raise ValueError(problem)
    return shardings


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of batches (B, T): rows over data and fsdp."""
    return NamedSharding(mesh, P(BATCH_AXES))


def check_batch(mesh: Mesh, batch_size: int, accumulate: int = 1) -> None:
    """Raises ValueError unless the rows of a microbatch divide over the data and fsdp axes."""
    ways = _ways(mesh, BATCH_AXES)
    if batch_size // accumulate % ways:
        parts = "" if accumulate == 1 else f" in {accumulate} microbatches (--accumulate)"
        times = "" if accumulate == 1 else f" x {accumulate} microbatches"
        raise ValueError(
            f"batch size {batch_size}{parts} must be a multiple of data x fsdp = {ways} devices"
            f"{times}; change --batch-size or the mesh"
        )


def constrain(x: jax.Array, *axes: Any) -> jax.Array:
    """Constrains x's sharding inside `jax.set_mesh(...)`; does nothing without a mesh.

    Axes that the mesh lacks, that are already manual (inside `shard_map`), or that do not divide
    their dimension are left out: this is a hint to the compiler, never a change of values.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _auto_axes(mesh):
        return x
    return jax.lax.with_sharding_constraint(x, _kept(mesh, x.shape, axes))


def gather_fsdp(x: jax.Array, path: str) -> jax.Array:
    """Constrains a parameter to its rule without `fsdp`: one all-gather, in x's dtype, at its use.

    Without this the compiler may split a contraction over fsdp, which is also the batch's axis.

    x is constrained to its whole rule first. Otherwise a cast in front of this takes the gathered
    sharding too, and the stored float32 travels instead of the bfloat16 it becomes. The gradient
    goes the same way back: summed as it comes out of the layer, then cut to this device's share,
    which together is a reduce-scatter, and the share alone is kept and cast.

    The share keeps the parameters' order in memory. Left alone, XLA lets the order that suits the
    collective (the split dimension first) run on through the optimiser, and copies every new
    parameter and moment back: for `2b` on two GPUs some 15 GB of traffic per step that this avoids.
    """
    for pattern, spec in RULES:
        if re.search(pattern, path):
            rest = [None] * (x.ndim - len(spec))
            split: Any = constrain(x, *spec, *rest)
            mesh = jax.sharding.get_abstract_mesh()
            if "fsdp" in _auto_axes(mesh) and mesh.shape["fsdp"] > 1:
                split = _in_order(mesh, _kept(mesh, x.shape, (*spec, *rest)), split)
            return constrain(split, *(None if a == "fsdp" else a for a in spec), *rest)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_order(mesh: AbstractMesh, spec: P, x: jax.Array) -> jax.Array:
    """x; each device's share of its gradient lies in memory with the last dimension innermost."""
    del mesh, spec
    return x


def _lay_in_order(mesh: AbstractMesh, spec: P, _, dx: jax.Array) -> tuple[jax.Array]:
    # Per device: the compiler of some jax releases cannot partition a constraint of the layout.
    lay: Any = jax.shard_map(
        lambda share: with_layout_constraint(share, Layout(tuple(range(dx.ndim)))),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names=frozenset(_auto_axes(mesh)),
        check_vma=False,
    )
    return (lay(dx),)


_in_order.defvjp(lambda mesh, spec, x: (x, None), _lay_in_order)


def _auto_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """Axes of a mesh that the compiler handles."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(str(name) for name, kind in kinds if kind == AxisType.Auto)


def _kept(mesh: AbstractMesh, shape: tuple[int, ...], axes: tuple[Any, ...]) -> P:
    """The axes that `constrain` takes for an array of this shape."""
    known, sizes = _auto_axes(mesh), mesh.shape

    def keep(size: int, entry: Any) -> Any:
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        names = tuple(n for n in names if n in known)
        return names if names and size % math.prod(sizes[n] for n in names) == 0 else None

    return P(*(keep(s, a) for s, a in zip(shape, axes, strict=True)))


def _ways(mesh: Mesh, axes: Any) -> int:
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    absent = [n for n in names if n not in mesh.shape]
    if absent:
        raise ValueError(
            f"the mesh has axes {list(mesh.axis_names)} and no {absent[0]!r}; use make_mesh, or "
            "rules for these axes"
        )
    return math.prod(mesh.shape[n] for n in names)
