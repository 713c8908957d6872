"""Array operations on single leaves, the same for arrays, for tracers and for shapes alone.

`run` is the only place where surgery computes. Of `jax.ShapeDtypeStruct`s it makes the struct of
the result; under `jax.jit` it traces; on arrays it runs one small compiled program per leaf, so
that at most one new leaf is being made at a time. The result lies as its source did.

Neurons are rows, and rows are what tensor parallelism splits: a concatenation of split arrays moves
most rows to another device. So programs on rows trade the split of axis 0 for a finer split of the
columns (an all-to-all), do their work without communication, and trade back. No device ever holds
more than its share of a matrix; only vectors (one number per neuron) pass whole.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax.sharding import partition_specs
from sparsejax.types import Params

Leaf = Any
"""An array, a tracer, or a `jax.ShapeDtypeStruct`."""


def run(
    function: Callable[..., Any],
    sources: Sequence[Leaf],
    operands: Sequence[Leaf] = (),
    static: tuple[Any, ...] = (),
    *,
    path: str,
    rows: bool = True,
) -> Any:
    """function(sources, operands, static=static): one leaf, or a tuple of leaves.

    Args:
      function: a module-level function (its compiled form is kept).
      sources: leaves of one kind and layout; results take the sharding of the first.
      operands: further arguments, vectors of indices or of scales.
      static: hashable arguments.
      path: where the leaf lies; says how it is split when the sources are tracers.
      rows: results depend on whole columns of the sources, column by column.
    """
    sharding = sharding_of(sources[0], path)
    columns = _column_split(sharding, sources[0].shape) if rows else None
    body = _body(function, static, sharding, columns)
    sources, operands = tuple(sources), tuple(operands)
    if is_shape(sources[0]):
        shapes = jax.eval_shape(functools.partial(function, static=static), sources, operands)
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes
        )
    if any(isinstance(leaf, Tracer) for leaf in (*sources, *operands)):
        return body(sources, operands)
    return _compiled(function, static, sharding, columns)(sources, operands)


def is_shape(leaf: Leaf) -> bool:
    """Whether the leaf is a shape without values."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def sharding_of(leaf: Leaf, path: str) -> NamedSharding | None:
    """How the leaf at `path` is split over a mesh, None if it is not.

    A tracer does not tell: under `jax.set_mesh` its path does, by the sharding rules.
    """
    if not isinstance(leaf, Tracer):
        found = getattr(leaf, "sharding", None)
        return found if isinstance(found, NamedSharding) else None
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(t != AxisType.Auto for t in mesh.axis_types):
        return None
    *folders, name = path.split("/")
    tree: Any = {name: leaf}
    for folder in reversed(folders):
        tree = {folder: tree}
    (spec,) = jax.tree.leaves(partition_specs(tree), is_leaf=lambda x: isinstance(x, P))
    entries = []
    for size, entry in zip(leaf.shape, spec, strict=False):
        axes = tuple(a for a in _names(entry) if a in mesh.shape)
        divides = size % math.prod(mesh.shape[a] for a in axes) == 0
        entries.append(axes if axes and divides else None)
    return NamedSharding(mesh, P(*entries))


def ways(sharding: NamedSharding, dim: int) -> int:
    """Over how many devices dimension `dim` is split."""
    spec = sharding.spec
    return math.prod(sharding.mesh.shape[a] for a in (_names(spec[dim]) if dim < len(spec) else ()))


def check_divides(function: str, argument: str, leaf: Leaf, path: str, dim: int, size: int) -> None:
    """Raises ValueError unless `size` divides as dimension `dim` of the leaf is split."""
    sharding = sharding_of(leaf, path)
    if sharding is None or size % ways(sharding, dim) == 0:
        return
    n, axes = ways(sharding, dim), "x".join(_names(sharding.spec[dim]))
    raise ValueError(
        f"{function}: {argument} gives {path} a dimension {dim} of size {size}, which does not "
        f"divide over the mesh axis {axes!r} = {n} devices that splits it; use a multiple of {n}"
    )


class Donated:
    """Frees leaves of the old tree as soon as the new tree has what it needs of them.

    Does nothing unless `donate`. A leaf that lies at two paths is left alone.

    Raises:
      ValueError: the leaves are tracers, whose memory is the caller's `jax.jit`'s to manage.
    """

    def __init__(self, function: str, params: Params, donate: bool):
        leaves = jax.tree.leaves(params)
        if donate and any(isinstance(leaf, Tracer) for leaf in leaves):
            raise ValueError(
                f"{function}: donate=True works on arrays, and params are being traced; leave it "
                "False and pass donate_argnums to jax.jit"
            )
        self._uses = Counter(id(leaf) for leaf in leaves) if donate else Counter()

    def free(self, leaves: Sequence[Leaf], *, made: Any) -> None:
        """Deletes `leaves`, once `made` (what was computed from them) exists."""
        if not self._uses:
            return
        jax.block_until_ready([x for x in jax.tree.leaves(made) if isinstance(x, jax.Array)])
        for leaf in leaves:
            if isinstance(leaf, jax.Array) and self._uses[id(leaf)] == 1:
                leaf.delete()


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _column_split(sharding: NamedSharding | None, shape: tuple[int, ...]) -> NamedSharding | None:
    """All of the leaf's splits on axis 1; None where there is nothing to trade."""
    if sharding is None or len(shape) != 2 or ways(sharding, 0) == 1:
        return None
    spec = sharding.spec
    axes = (*(_names(spec[1]) if len(spec) > 1 else ()), *_names(spec[0]))
    if shape[1] % math.prod(sharding.mesh.shape[a] for a in axes):
        return None
    return NamedSharding(sharding.mesh, P(None, axes))


def _body(function, static, sharding, columns):
    def lay(tree: Any, where: NamedSharding | None) -> Any:
        if where is None:
            return tree
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, where), tree)

    def body(sources, operands):
        result = function(lay(sources, columns), operands, static=static)
        return lay(lay(result, columns), sharding)

    return body


@functools.lru_cache(maxsize=256)
def _compiled(function, static, sharding, columns):
    return jax.jit(_body(function, static, sharding, columns), out_shardings=sharding)
