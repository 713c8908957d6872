"""A Hugging Face folder as config, parameters and tokenizer."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from sparsejax.config import ModelConfig
from sparsejax.convert import config_json
from sparsejax.convert.safetensors_io import DTYPES, Entry, FolderError, open_folder, read
from sparsejax.convert.tensors import cast, counterpart
from sparsejax.data import HFTokenizer
from sparsejax.params import check_params, flatten, param_shapes
from sparsejax.sharding import tree_shardings
from sparsejax.types import Params

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Tables that old files carry and that follow from the config.
_COMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def load(
    path: str | os.PathLike,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    *,
    context_length: int | None = None,
    ignore_keys: Collection[str] = (),
) -> tuple[ModelConfig, Params, HFTokenizer | None]:
    """Reads a Hugging Face folder: (config, params, tokenizer).

    Tensors are read one at a time and go straight to their devices: beyond the result, the host
    holds one tensor, and a rearranged copy of it.

    Args:
      path: the folder, with config.json and safetensors; `sparsejax.convert.FAMILIES` lists what is
        known.
      mesh: where parameters go, by `sparsejax.sharding.RULES`; None takes the first device.
      dtype: "float32", "bfloat16" or "float16" for parameters and computation; None keeps the
        dtype of the files.
      context_length: use the model up to this many positions only.
      ignore_keys: unknown config keys that are known to leave the mathematics alone.

    Returns:
      The config, the parameters, and the tokenizer of tokenizer.json (None where there is none).
      The embedding may have more rows than the tokenizer has ids: pass
      `num_tokens=tokenizer.vocab_size` to `sparsejax.generate.generate`.

    Raises:
      FolderError: the folder is damaged, incomplete or of an architecture that is not supported;
        says which file, tensor or key.
      ValueError: an argument out of its range, a mesh that does not fit the model, or a number
        that is infinite in `dtype`.
    """
    folder = Path(path)
    values = config_json.read_json(folder / "config.json")
    config = config_json.from_hf(
        values, f"{folder}/config.json", context_length=context_length, ignore_keys=ignore_keys
    )
    entries = open_folder(folder)
    _drop_what_follows(config, entries)
    dtype = _dtype(dtype, entries, folder)
    config = config.replace(dtype=dtype, param_dtype=dtype)
    shapes = param_shapes(config)
    wanted = flatten(shapes)
    _check(wanted, entries, folder, values)
    if mesh is None:
        shardings = dict.fromkeys(wanted, SingleDeviceSharding(jax.devices()[0]))
    else:
        shardings = flatten(tree_shardings(mesh, shapes))
    tokenizer = load_tokenizer(folder)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise FolderError(
            f"{folder}: tokenizer.json has ids up to {tokenizer.vocab_size - 1}, but the embedding "
            f"has vocab_size = {config.vocab_size} rows"
        )
    leaves = [_place(p, leaf, entries, shardings[p]) for p, leaf in wanted.items()]
    params = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    check_params(config, params)
    return config, params, tokenizer


def load_tokenizer(folder: Path) -> HFTokenizer | None:
    """The folder's tokenizer.json, with what its template puts in front of a text as `prefix`.

    Documents end with the first eos_token_id of the folder's configs.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    eos = None
    for name in ("generation_config.json", "config.json"):
        if eos is None and (folder / name).is_file():
            eos = config_json.read_json(folder / name).get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    eos = eos if isinstance(eos, int) else None
    tokenizer = HFTokenizer(folder / "tokenizer.json", eot_id=eos)
    tokenizer.prefix = tokenizer.added_in_front()
    return tokenizer


def _drop_what_follows(config: ModelConfig, entries: dict[str, Entry]) -> None:
    """Removes computed tables, and a tied model's second copy of the embedding if it is one."""
    for name in [name for name in entries if name.endswith(_COMPUTED)]:
        del entries[name]
    both = [entries[name] for name in (HEAD, EMBEDDING) if name in entries]
    if config.tie_embeddings and len(both) == 2 and all(e.dtype in DTYPES for e in both):
        head, embedding = read(entries[HEAD]), read(entries[EMBEDDING])
        if not np.array_equal(head.view(np.uint8), embedding.view(np.uint8)):
            raise FolderError(
                f"{entries[HEAD].file}: {HEAD} differs from {EMBEDDING}, but config.json says "
                "tie_word_embeddings = true; set it to false if the head is its own"
            )
        del entries[HEAD]


def _dtype(dtype: str | None, entries: dict[str, Entry], folder: Path) -> str:
    found: dict[str, str] = {}
    for entry in entries.values():
        if entry.dtype not in DTYPES:
            raise FolderError(
                f"{entry.file}: {entry.name} has dtype {entry.dtype}; expected one of "
                f"{', '.join(DTYPES)} (quantised weights are not supported)"
            )
        found.setdefault(entry.dtype, entry.name)
    allowed = [d.name for d in DTYPES.values()]
    if dtype is not None:
        if dtype not in allowed:
            raise ValueError(f"dtype must be one of {allowed} or None, got {dtype!r}")
        return dtype
    if len(found) > 1:
        examples = ", ".join(f"{name} is {d}" for d, name in found.items())
        raise FolderError(f"{folder} mixes dtypes ({examples}); say which one with dtype=")
    return DTYPES[next(iter(found))].name if found else "float32"


def _check(
    wanted: dict[str, jax.ShapeDtypeStruct],
    entries: dict[str, Entry],
    folder: Path,
    values: dict,
) -> None:
    problems, names = [], set()
    hybrid = bool(values.get("sparsity_use_hybrid_kernel"))
    for path, leaf in wanted.items():
        name, layout = counterpart(path)
        names.add(name)
        shape = layout.shape(leaf.shape)
        if name not in entries:
            problems.append(f"{name}: missing, expected shape {list(shape)}")
        elif entries[name].shape != shape:
            # The published sparse training code keeps `down` as (F, D) when its kernel is on.
            swapped = entries[name].shape == shape[::-1] and path.endswith("ffn/down")
            if not (swapped and hybrid):
                problems.append(
                    f"{name}: expected shape {list(shape)}, got {list(entries[name].shape)}"
                )
        elif path.endswith("ffn/down") and shape[0] == shape[1] and hybrid:
            problems.append(
                f"{name}: with sparsity_use_hybrid_kernel and a square shape it is not known "
                "whether it is transposed; save it without that option"
            )
    problems += [
        f"{name}: not in the config, shape {list(entry.shape)}"
        for name, entry in entries.items()
        if name not in names
    ]
    if problems:
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise FolderError(
            f"the tensors of {folder} do not fit its config.json:\n  "
            + "\n  ".join(problems[:20])
            + more
        )


def _place(
    path: str, leaf: jax.ShapeDtypeStruct, entries: dict[str, Entry], sharding: Sharding
) -> jax.Array:
    name, layout = counterpart(path)
    stored = read(entries[name])
    # 16-bit integers: NumPy rearranges them far faster than it does bfloat16.
    source = stored.view(np.uint16) if stored.dtype.itemsize == 2 else stored
    if entries[name].shape == layout.shape(leaf.shape):
        source = layout.to_ours(source, leaf.shape)
    dtype = jnp.dtype(leaf.dtype)

    def part(index: Any) -> np.ndarray:
        block = np.ascontiguousarray(source[index]).view(stored.dtype)
        return cast(block, dtype, f"{entries[name].file}: {name}")

    return jax.make_array_from_callback(leaf.shape, sharding, part)
