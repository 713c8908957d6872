"""Digests of array trees: one 64-bit number per leaf that any single flipped bit changes.

Why not a checksum of the files: what a run resumes from is the values on the devices. A digest of
the values is the same before saving and after restoring on any mesh, and nothing is gathered for
it: each device sums over its own shard, and a few integers per leaf cross the network.

Element number `i = (hi, lo)`, row-major in two 32-bit words, with bits `b` adds to two uint32 sums

    lane0 += A(b ^ k0)        lane1 += B(b + k1)        (k0, k1) = feistel(hi, lo)

- A and B are bijections of 32-bit words, and for a fixed key so are `b ^ k0` and `b + k1`. Changing
  the bits of one element therefore changes its summand in both lanes, and so both sums: a single
  changed element, hence a single flipped bit, is always seen. Several changed elements go unseen
  only where two independent 32-bit sums agree by chance: 2^-64.
- The Feistel rounds are a bijection of the 64-bit index: no two elements share their keys, also
  beyond 2^32 elements. Moved, swapped or repeated elements change the sums.
- Sums of integers modulo 2^32 do not depend on their order: any sharding, number of devices or of
  processes gives the same digest. No floating-point operation touches the bits, so NaN payloads and
  signed zeros count.

It guards against faults, not against an adversary.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

_WORD = 2**32


class LeafSummary(NamedTuple):
    """What one pass over a leaf found: 16 hex digits, and whether all its numbers are finite."""

    digest: str
    finite: bool


def tree_digests(tree: Any) -> dict[str, str]:
    """Digest of each leaf's bits, {"params/layer_0/ffn/gate": "9ae16a3b2f90404f", ...}.

    Computed on the devices in one pass over each leaf; every process of a run calls it and gets the
    same result. Shape and dtype are not part of the digest: compare them too.

    Args:
        tree: pytree of `jax.Array` (any sharding, also not fully addressable ones).

    Returns:
        path -> 16 hex digits, in the order of the tree's leaves.

    Raises:
        ValueError: a leaf is not a `jax.Array`, or two leaves have the same path.
    """
    return {path: summary.digest for path, summary in tree_summaries(tree).items()}


def tree_summaries(tree: Any) -> dict[str, LeafSummary]:
    """Like `tree_digests`, and whether each leaf is finite, from the same pass."""
    leaves = flat_leaves(tree)
    pending = {}
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"leaf {path!r}: expected a jax.Array, got {type(leaf).__name__}; use jnp.asarray"
            )
        pending[path] = _summary(path, leaf)  # dispatched; on a GPU nothing waits here
        if jax.default_backend() == "cpu":
            # Host devices share a pool of as many threads: two independent programs with a psum in
            # flight can hold all of them, each waiting for a device that the other one blocks.
            jax.block_until_ready(pending[path])
    return {path: _to_host(value) for path, value in pending.items()}


def flat_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of a pytree by path: dict keys, field names and indices joined by "/"."""
    flat: dict[str, Any] = {}
    for key_path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if path in flat:
            raise ValueError(f"two leaves have the path {path!r}; rename the keys that contain '/'")
        flat[path] = leaf
    return flat


def _summary(path: str, leaf: jax.Array) -> jax.Array | None:
    if leaf.size == 0:
        return None
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(
            f"leaf {path!r}: {leaf.dtype} has no bits of its own; store jax.random.key_data(key)"
        )
    if max(leaf.shape, default=1) > _WORD:
        raise ValueError(f"leaf {path!r}: an axis of {leaf.shape} is longer than 2^32; reshape it")
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        mesh, spec = sharding.mesh, sharding.spec
    elif len(sharding.device_set) == 1:
        mesh, spec = Mesh(np.array(list(sharding.device_set)), ("device",)), PartitionSpec()
        leaf = jax.device_put(leaf, NamedSharding(mesh, spec))  # the same buffer
    else:
        raise ValueError(
            f"leaf {path!r}: expected a NamedSharding or a single device, got {sharding}"
        )
    # The leaf's own mesh: whatever mesh the caller has set may span other devices.
    with jax.set_mesh(mesh):
        return _compiled(mesh, spec)(leaf)


def _to_host(value: jax.Array | None) -> LeafSummary:
    if value is None:
        return LeafSummary("0" * 16, True)
    lane0, lane1, not_finite = (int(v) for v in np.asarray(value.addressable_data(0)))
    return LeafSummary(f"{lane0:08x}{lane1:08x}", not not_finite)


@functools.lru_cache(maxsize=1024)
def _compiled(mesh: Mesh, spec: PartitionSpec):
    """Digest of an array with one sharding: each device sums over its shard, then a psum."""
    names_per_axis = [() if n is None else (n,) if isinstance(n, str) else tuple(n) for n in spec]
    names = tuple(name for axis_names in names_per_axis for name in axis_names)

    def global_summary(x: Array) -> UInt32[Array, " lanes"]:
        def shard_summary(shard: Array) -> UInt32[Array, " lanes"]:
            starts = [_u32(0)] * shard.ndim
            for axis, axis_names in enumerate(names_per_axis):
                if axis_names:
                    block = jax.lax.axis_index(axis_names).astype(jnp.uint32)
                    starts[axis] = block * _u32(shard.shape[axis])
            sums = _summary_of_shard(shard, x.shape, starts)
            return jax.lax.psum(sums, names) if names else sums

        return jax.shard_map(shard_summary, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())(x)

    return jax.jit(global_summary)


def _summary_of_shard(
    x: Array, shape: tuple[int, ...], starts: Sequence[Array]
) -> UInt32[Array, " lanes"]:
    """(lane0, lane1, how many elements are not finite) of an array's block at `starts`."""
    hi, lo = _index(x.shape, shape, starts)
    k0, k1 = _keys(hi, lo)
    lane0, lane1 = jnp.zeros_like(lo), jnp.zeros_like(lo)
    for number, word in enumerate(_words(x)):
        # The second word of an element (64-bit types) gets keys of its own.
        lane0 += _mix_a(word ^ (k0 + _u32(number * 0x9E3779B9)))
        lane1 += _mix_b(word + (k1 ^ _u32(number * 0x85EBCA6B)))
    if jnp.issubdtype(x.dtype, jnp.inexact):
        not_finite = (~jnp.isfinite(x)).astype(jnp.uint32)
    else:
        not_finite = jnp.zeros_like(lo)
    # One reduction with three results. Three sums would write three arrays of x's size first: on a
    # CPU 230 instead of 1,700 million float32 per second (2 cores, jax 0.10.2).
    zero = _u32(0)
    axes = tuple(range(x.ndim))
    sums = jax.lax.reduce((lane0, lane1, not_finite), (zero, zero, zero), _add, axes)
    return jnp.stack(sums)


def _add(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


def _u32(value: int) -> Any:
    return jnp.uint32(value % _WORD)


def _words(x: Array) -> list[Array]:
    """The bits of each element as one or two uint32 arrays of x's shape."""
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _words(x.real) + _words(x.imag)
    bits = (
        jnp.finfo(x.dtype).bits
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.iinfo(x.dtype).bits
    )
    if bits == 64:
        pairs = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return [pairs[..., 0], pairs[..., 1]]
    unsigned = {4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bits]
    return [jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)]


def _split_axis(shape: tuple[int, ...]) -> int:
    """First axis of the low index word: the axes from it on number at most 2^32 elements."""
    axis, size = len(shape), 1
    while axis > 0 and size * shape[axis - 1] <= _WORD:
        axis -= 1
        size *= shape[axis]
    return axis


def _index(
    block: tuple[int, ...], shape: tuple[int, ...], starts: Sequence[Array]
) -> tuple[Array, Array]:
    """(hi, lo) uint32 row-major element numbers, without repeats, of a block of an array."""
    split = _split_axis(shape)
    words = []
    for axes in (range(split), range(split, len(shape))):
        word, stride = jnp.zeros(block, jnp.uint32), 1
        for axis in reversed(axes):
            place = jax.lax.broadcasted_iota(jnp.uint32, block, axis) + starts[axis]
            word += place * _u32(stride)
            stride *= shape[axis]
        if stride > _WORD:
            raise ValueError(f"shape {shape} has more than 2^64 elements")
        words.append(word)
    return words[0], words[1]


def _keys(hi: Array, lo: Array) -> tuple[Array, Array]:
    """Three Feistel rounds: a bijection of the 64-bit index (hi, lo)."""
    lo = lo ^ _mix_a(hi ^ _u32(0x243F6A88))
    hi = hi ^ _mix_b(lo ^ _u32(0x85A308D3))
    lo = lo ^ _mix_a(hi ^ _u32(0x13198A2E))
    return lo, hi


def _mix_a(h: Array) -> Array:
    """MurmurHash3's 32-bit finaliser, a bijection."""
    h = (h ^ (h >> _u32(16))) * _u32(0x85EBCA6B)
    h = (h ^ (h >> _u32(13))) * _u32(0xC2B2AE35)
    return h ^ (h >> _u32(16))


def _mix_b(h: Array) -> Array:
    """ "lowbias32" of C. Wellons' hash prospector, a bijection."""
    h = (h ^ (h >> _u32(16))) * _u32(0x7FEB352D)
    h = (h ^ (h >> _u32(15))) * _u32(0x846CA68B)
    return h ^ (h >> _u32(16))


def differing(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Paths whose digests differ or that only one side has, in the order of `expected`."""
    paths = list(expected) + [path for path in found if path not in expected]
    return [path for path in paths if found.get(path) != expected.get(path)]
