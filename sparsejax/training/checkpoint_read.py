"""Arrays out of a checkpoint's `state` folder, each process reading what its devices hold.

Read with tensorstore, the library that orbax writes with, and not through orbax: a damaged leaf is
then known by its path, whatever else orbax's own metadata files say; no process waits in a barrier
for one that met an error; and a failed read leaves no unfinished coroutines behind (orbax 0.12.8
does, and Python reports each of them on stderr).
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from sparsejax.training.checkpoint_meta import describe

_READ_AHEAD = 1 << 30  # bytes of host memory


class DamagedError(Exception):
    """A checkpoint cannot be used, through no fault of the caller."""


def read_arrays(folder: Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The arrays stored under the paths of `wanted`, laid out on the devices as it says.

    Args:
        folder: where orbax wrote a flat mapping path -> array (OCDBT, zarr 2).
        wanted: path -> leaf with `shape`, `dtype` and `sharding`. Arrays without elements are made
            up: they are not stored.

    Returns:
        path -> array, in the order of `wanted`.

    Raises:
        DamagedError: a leaf cannot be read, or has another shape or dtype; names it.
    """
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    arrays: dict[str, jax.Array] = {}
    waiting: collections.deque[_Reading] = collections.deque()
    ahead = 0
    for path, leaf in wanted.items():
        reading = _Reading.start(folder, path, leaf, context)
        waiting.append(reading)
        ahead += reading.nbytes
        while ahead > _READ_AHEAD:
            first = waiting.popleft()
            arrays[first.path] = first.finish()
            ahead -= first.nbytes
    return arrays | {reading.path: reading.finish() for reading in waiting}


@dataclasses.dataclass
class _Reading:
    """The blocks of one leaf that this process needs, on their way from disk."""

    path: str
    leaf: Any
    blocks: dict[tuple, Any]  # (start, stop) per axis -> future of a NumPy array

    @property
    def nbytes(self) -> int:
        block = math.prod(self.leaf.sharding.shard_shape(self.leaf.shape))
        return len(self.blocks) * block * jnp.dtype(self.leaf.dtype).itemsize

    @classmethod
    def start(cls, folder: Path, path: str, leaf: Any, context: ts.Context) -> "_Reading":
        blocks: dict[tuple, Any] = {}
        if math.prod(leaf.shape):
            store = _open(folder, path, leaf, context)
            for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values():
                key = _key(index or (), leaf.shape)
                if key not in blocks:  # replicas read once
                    blocks[key] = store[tuple(slice(*ends) for ends in key)].read()
        return cls(path, leaf, blocks)

    def finish(self) -> jax.Array:
        shape, dtype = self.leaf.shape, jnp.dtype(self.leaf.dtype)
        data: dict[tuple, np.ndarray] = {}
        try:
            for key, future in self.blocks.items():
                data[key] = future.result()
        except MemoryError:
            raise
        except Exception as error:  # tensorstore has a Python type for each of many states
            raise DamagedError(f"{self.path} cannot be read: {_first_words(error)}") from error

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            key = _key(index or (), shape)
            return data[key] if data else np.zeros([stop - start for start, stop in key], dtype)

        return jax.make_array_from_callback(shape, self.leaf.sharding, block, dtype=dtype)


def _open(folder: Path, path: str, leaf: Any, context: ts.Context) -> Any:
    spec = {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{folder}/"},
            "path": f"{path}/",
        },
    }
    try:
        store = ts.open(spec, read=True, open=True, context=context).result()
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise DamagedError(f"{path} cannot be opened: {_first_words(error)}") from error
    found = describe(store.shape, store.dtype.numpy_dtype)
    expected = describe(leaf.shape, leaf.dtype)
    if found != expected:
        raise DamagedError(f"{path} is stored as {found}, its metadata says {expected}")
    return store


def _key(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _first_words(error: Exception) -> str:
    """The error's text without tensorstore's appended JSON spec and source lines."""
    return str(error).split(" [", 1)[0][:400]
