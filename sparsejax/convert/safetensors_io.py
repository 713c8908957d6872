"""Safetensors folders: every header checked on opening, tensors read one at a time, files streamed.

A file is an 8-byte length n, n bytes of JSON `{name: {dtype, shape, data_offsets}}`, then the data
without gaps. Reading and writing are done here and not by the safetensors package because its
writer wants a whole shard (5 GB) in memory at once and, in 0.8.0, writes strided arrays scrambled,
and because its mapped files count as the process's memory. Tests compare both ways with the
package.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5 * 10**9
# The floating dtypes that models are kept in; all others belong to quantised or other files.
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": jnp.dtype("bfloat16"),
    "F16": np.dtype(np.float16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors$")


class FolderError(ValueError):
    """A checkpoint folder is damaged, incomplete or of a kind that is not supported."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `size` bytes from `begin` of `file`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


def open_folder(path: Path) -> dict[str, Entry]:
    """Every tensor of a folder by name; headers are read and checked, the data is not.

    Args:
      path: a folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    Raises:
      FolderError: no weights, an absent shard, a damaged file, or an index that does not fit.
    """
    if not path.is_dir():
        raise FolderError(f"{path} is no folder; expected one with config.json and safetensors")
    if (path / INDEX).is_file():
        return _open_indexed(path)
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE)
    shards = {file.name: _SHARD.match(file.name) for file in sorted(path.glob("*.safetensors"))}
    matches = [match for match in shards.values() if match]
    if not matches or len(matches) < len(shards):
        found = sorted(file.name for file in path.iterdir())[:8]
        hint = "; PyTorch's .bin files are not read" if any(".bin" in f for f in found) else ""
        raise FolderError(f"{path} has neither {SINGLE} nor {INDEX}; it holds {found}{hint}")
    stem, count = matches[0][1], int(matches[0][3])
    wanted = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    if absent := [name for name in wanted if name not in shards]:
        raise FolderError(f"{path}: missing shard {', '.join(absent)} (and it has no {INDEX})")
    entries: dict[str, Entry] = {}
    for name in wanted:
        header = read_header(path / name)
        if twice := sorted(entries.keys() & header.keys()):
            raise FolderError(f"{path}: tensor {twice[0]} is in two shards, one of them {name}")
        entries |= header
    return entries


def _open_indexed(path: Path) -> dict[str, Entry]:
    index = _parse((path / INDEX).read_bytes(), path / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FolderError(f"{path / INDEX} has no 'weight_map' of tensor names to files")
    if (path / SINGLE).is_file() and SINGLE not in weight_map.values():
        # transformers would read the one, and other readers the rest.
        raise FolderError(
            f"{path} holds {SINGLE}, which {INDEX} does not name: two models, or what is left of "
            "an older one; remove the one that is not meant"
        )
    files: dict[str, list[str]] = {}
    for tensor, file in weight_map.items():
        files.setdefault(str(file), []).append(tensor)
    entries: dict[str, Entry] = {}
    for file, tensors in sorted(files.items()):
        if Path(file).name != file:
            raise FolderError(f"{path / INDEX} names {file!r}, which is not a file of the folder")
        if not (path / file).is_file():
            more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
            raise FolderError(
                f"{path}: missing shard {file}; {INDEX} has tensor {tensors[0]}{more} in it"
            )
        header = read_header(path / file)
        if absent := sorted(set(tensors) - header.keys()):
            raise FolderError(f"{path / file} lacks tensor {absent[0]}, which {INDEX} has in it")
        if extra := sorted(header.keys() - set(tensors)):
            raise FolderError(f"{path / file} holds tensor {extra[0]}, which {INDEX} does not name")
        entries |= header
    return entries


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one file.

    Raises:
      FolderError: the file is cut off, or its header is damaged or does not fit its length.
    """
    total = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little") if total >= 8 else total
        if length > total - 8:
            raise FolderError(
                f"{file} is truncated or no safetensors file: {total} bytes, its header alone "
                f"asks for {8 + length}"
            )
        header = _parse(stream.read(length), file)
    if not isinstance(header, dict):
        raise FolderError(f"{file}: the header is no JSON object")
    header.pop("__metadata__", None)
    entries = {}
    for name, spec in header.items():
        try:
            dtype, shape = spec["dtype"], tuple(operator.index(n) for n in spec["shape"])
            begin, stop = (operator.index(n) for n in spec["data_offsets"])
            if not isinstance(dtype, str):
                raise TypeError("dtype must be a text")
        except (KeyError, TypeError, ValueError) as error:
            raise FolderError(f"{file}: the header's entry of {name} is damaged: {spec}") from error
        if not 0 <= begin <= stop:
            raise FolderError(f"{file}: {name} has the offsets [{begin}, {stop}]")
        if dtype in DTYPES and stop - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise FolderError(
                f"{file}: {name} of shape {list(shape)} and dtype {dtype} has {stop - begin} bytes"
            )
        entries[name] = Entry(name, file, dtype, shape, 8 + length + begin, stop - begin)
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.size)):
        if entry.begin != end:
            raise FolderError(f"{file} is damaged: {entry.name} does not begin where data ends")
        end += entry.size
    if end != total:
        what = "truncated" if end > total else "damaged"
        raise FolderError(f"{file} is {what}: it has {total} bytes, its header asks for {end}")
    return entries


def _parse(data: bytes, file: Path) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FolderError(f"{file} is damaged: no JSON where JSON is expected ({error})") from error


def read(entry: Entry) -> np.ndarray:
    """The tensor in memory of its own, C-ordered."""
    raw = np.fromfile(entry.file, np.uint8, count=entry.size, offset=entry.begin)
    if raw.size != entry.size:
        raise FolderError(f"{entry.file} changed while it was read: {entry.name} is cut off")
    return raw.view(DTYPES[entry.dtype]).reshape(entry.shape)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to be written; `get` makes it when its turn comes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    get: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(
    path: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes shards of at most `max_shard_bytes` (one tensor at least) and, if several, the index.

    Raises:
      ValueError: the folder holds weights already.
    """
    path.mkdir(parents=True, exist_ok=True)
    if old := sorted(file.name for file in path.glob("*.safetensors*")):
        raise ValueError(f"{path} holds {old[0]} already; name another folder or remove it")
    shards: list[dict[str, Tensor]] = []
    filled = 0
    for name, tensor in tensors.items():
        if not shards or filled + tensor.size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.size
    weight_map = {}
    for i, shard in enumerate(shards):
        one = len(shards) == 1
        file = SINGLE if one else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        _write_file(path / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensor.size for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(file: Path, tensors: Mapping[str, Tensor]) -> None:
    # Wide dtypes first keeps every tensor aligned to its own size.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    at = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    encoded = json.dumps(header).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)
    part = file.with_name(file.name + ".part")
    try:
        with part.open("wb") as stream:
            stream.write(len(encoded).to_bytes(8, "little") + encoded)
            for name in order:
                array = tensors[name].get()
                if array.shape != tensors[name].shape or array.dtype != tensors[name].dtype:
                    raise ValueError(
                        f"{name}: expected {tensors[name].dtype} {list(tensors[name].shape)}, got "
                        f"{array.dtype} {list(array.shape)}"
                    )
                # A transposed view has its bytes in another order than its elements.
                stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)  # it would fill a full disk, and bar the next attempt
