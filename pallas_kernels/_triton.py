"""The only importer of Pallas' Triton backend; kernels reach Triton through this file.

The backend is deprecated since jax 0.11.0 and still ships. The one warning that says so is filtered
here, and nothing else is. Every launch states its engine and its compiler parameters: which backend
a bare GPU `pallas_call` takes has changed between jax releases.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import dispatch

warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)

load = plgpu.load
store = plgpu.store


def pallas_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., list[Array]]:
    """`pl.pallas_call` on the Triton backend: whole arrays as refs, the grid indexed by the kernel.

    Args:
      kernel: function of the input refs and then the output refs.
      name: the kernel's name in lowered programs and profiles.
      grid: number of programs along each axis.
      out_shape: shapes and dtypes of the outputs.
      num_warps: warps per program.
      num_stages: depth of the software pipeline of loops that end in a dot.
      aliases: input index -> output index of buffers updated in place.

    Returns:
      A function of the input arrays that returns the outputs as a list.
    """

    def body(*refs: Any) -> None:
        kernel(*refs)

    body.__name__ = name  # the Triton lowering names the kernel after the function
    return pl.pallas_call(
        body,
        grid=grid,
        out_shape=list(out_shape),
        input_output_aliases=dict(aliases or {}),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=dispatch.interpreting(),
        name=name,
    )


def unwritten(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array of device memory as it was found; for results that this call's path does not use."""
    out_shape = [jax.ShapeDtypeStruct(shape, dtype)]
    return pallas_call(
        lambda _: None, name="unwritten", grid=(1,), out_shape=out_shape, num_warps=1, num_stages=1
    )()[0]


def barrier() -> None:
    """Makes what this program's threads stored visible to its later loads."""
    if not dispatch.interpreting():  # interpret mode is sequential and knows no barrier
        plgpu.debug_barrier()


def next_slot(counter_ref: Any, at: Array) -> Array:
    """Adds one to entry `at` of an int32 array in device memory; returns what it held before.

    The addition is an acquire and a release among all programs: what a program stored before a
    `barrier` and this call is visible to the program that reads the higher number.
    """
    # Index and value come from `at`: interpret mode refuses literals in atomics.
    return plgpu.atomic_add(counter_ref, (at,), at - at + 1)


def set_bits(ref: Any, at: tuple[Array, ...], bits: Array, live: Array) -> None:
    """Sets `bits`, none of which is set yet, in int32 words of device memory where `live`.

    The result does not depend on the order of programs. Lanes that are not live carry 0 and an
    index that no live lane has, because interpret mode knows no masked atomics; it knows no OR
    either, hence its addition, and on a GPU an addition of vectors lowers to one of floats.
    """
    if dispatch.interpreting():
        plgpu.atomic_add(ref, at, bits)
    else:
        plgpu.atomic_or(ref, at, bits, mask=live)


def dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """a (M, K) times b (K, N), or b (N, K) with `trans_b`, in float32; no TF32."""
    contract = 1 if trans_b else 0
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((1,), (contract,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def pack_bits(active: Array) -> Array:
    """Packs booleans (..., 32 * W) into int32 words (..., W), bit j of word w = column 32 w + j.

    A sum over a reshaped axis: it stays in registers, where a scan would go through shared memory.
    """
    *lead, columns = active.shape
    bits = active.reshape(*lead, columns // 32, 32)
    lanes = lax.broadcasted_iota(jnp.int32, bits.shape, len(lead) + 1)
    return jnp.sum(jnp.where(bits, jnp.int32(1) << lanes, 0), axis=-1, dtype=jnp.int32)


def lowest_bit(word: Array) -> Array:
    """Index of the lowest set bit of an int32 word (32 for 0)."""
    return lax.population_count((word & -word) - 1)


def add_bias(pre: Array, bias: Array | None) -> Array:
    """pre + bias as the dense engine adds them: in float32, rounded to pre's dtype."""
    if bias is None:
        return pre
    return (pre.astype(jnp.float32) + bias.astype(jnp.float32)).astype(pre.dtype)


def is_active(pre: Array) -> Array:
    """True where a ReLU lets the pre-activation through: not (pre <= 0), so NaN counts."""
    return jnp.logical_not(pre <= 0)


def split_width(width: int, widest: int = 8192) -> list[tuple[int, int]]:
    """Splits a width into (offset, size) parts whose sizes are powers of two, widest first.

    Triton tensors have power-of-two sides; covering 2560 as 2048 + 512 wastes no lane, where one
    masked block of 4096 would waste three in eight.
    """
    parts, offset = [], 0
    while offset < width:
        size = min(widest, 1 << ((width - offset).bit_length() - 1))
        parts.append((offset, size))
        offset += size
    return parts


def on_cuda() -> bool:
    """True where programs are compiled for CUDA: the default backend, or an abstract device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return any(name in str(device).lower() for name in ("gpu", "cuda", "nvidia"))
    # AMD's backend is called "gpu" too.
    version = str(getattr(jax.devices()[0].client, "platform_version", ""))
    return jax.default_backend() == "gpu" and "rocm" not in version.lower()


def partitioned_axes() -> list[str]:
    """Axes of the mesh in context over which the compiler, not the caller, splits arrays.

    Nothing partitions a kernel call, so it would gather its operands there.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return [str(name) for name, size, kind in axes if size > 1 and kind != manual]


def device_programs() -> int:
    """Streaming multiprocessors of the default device: programs of a grid that fills it once."""
    if dispatch.interpreting():
        return 2
    return int(getattr(jax.devices()[0], "core_count", 0) or 132)
