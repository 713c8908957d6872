"""The parameter tree: its shapes, paths, selection by pattern, counting and checking.

Everything here works on arrays and on `jax.ShapeDtypeStruct` leaves alike.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.config import ModelConfig
from sparsejax.types import Params


def path_string(path: tuple[Any, ...]) -> str:
    """A key path of `jax.tree_util` as "layer_0/ffn/gate"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by path, in tree order."""
    return {path_string(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def param_shapes(config: ModelConfig) -> Params:
    """The tree of `jax.ShapeDtypeStruct`s that `config` asks for, without allocating anything."""
    d, dtype = config.d_model, jnp.dtype(config.param_dtype)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    tree: Params = {"embed": {"embedding": leaf(config.vocab_size, d)}}
    for i, layer in enumerate(config.layers):
        entry: Params = {}
        if layer.attention is not None:
            a = layer.attention
            heads = {"q": a.num_heads, "k": a.num_kv_heads, "v": a.num_kv_heads}
            entry["attn_norm"] = {"scale": leaf(d)}
            entry["attn"] = {n: leaf(d, h, a.head_dim) for n, h in heads.items()}
            entry["attn"]["o"] = leaf(a.num_heads, a.head_dim, d)
            if a.qkv_bias:
                entry["attn"] |= {f"{n}_bias": leaf(h, a.head_dim) for n, h in heads.items()}
            if a.qk_norm:
                entry["attn"] |= {"q_norm": leaf(a.head_dim), "k_norm": leaf(a.head_dim)}
        if layer.ffn is not None:
            names = ("gate", "up", "down") if layer.ffn.gated else ("up", "down")
            entry["ffn_norm"] = {"scale": leaf(d)}
            entry["ffn"] = {n: leaf(layer.ffn.d_ff, d) for n in names}
            if layer.ffn.gate_bias:
                entry["ffn"]["gate_bias"] = leaf(layer.ffn.d_ff)
        if entry:
            tree[f"layer_{i}"] = entry
    tree["final_norm"] = {"scale": leaf(d)}
    if not config.tie_embeddings:
        tree["lm_head"] = {"kernel": leaf(d, config.vocab_size)}
    return tree


def init_params(config: ModelConfig, key: jax.Array, shardings: Params | None = None) -> Params:
    """Random parameters: matrices N(0, init_std^2), norms one, biases zero.

    Projections into the residual stream (o, down) are divided by sqrt(2 * number of layers). Each
    leaf draws from its own key, folded from its path, so no leaf's values depend on other leaves.
    Leaves of one kind and shape are made by one compiled program, however many layers there are:
    outside of `jit` this is much faster to compile than one program of all leaves.

    Args:
      config: the model.
      key: a JAX PRNG key.
      shardings: where each leaf goes, a tree of `jax.sharding.Sharding`s; each device makes its
        own share, and the values do not depend on the layout. None: the default device.

    Returns:
      The parameter tree, in `config.param_dtype`.
    """
    shapes = param_shapes(config)
    if shardings is None:
        shardings = jax.tree.map(lambda _: None, shapes)

    def init(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        name = path_string(path)
        program = _leaf_program(*_distribution(config, name), leaf.shape, leaf.dtype, sharding)
        return program(key, np.uint32(_stable_hash(name)))

    return jax.tree_util.tree_map_with_path(init, shapes, shardings)


def leaf_initializer(config: ModelConfig, path: str) -> Callable[..., jax.Array]:
    """The initialiser `(key, shape, dtype) -> array` of the leaf at `path`; see `init_params`."""
    return functools.partial(_draw, *_distribution(config, path))


def _distribution(config: ModelConfig, path: str) -> tuple[float, float]:
    """(mean, standard deviation) of the leaf at `path`."""
    kind = path.rsplit("/", 1)[-1]
    if kind in ("scale", "q_norm", "k_norm"):
        return 1.0, 0.0
    if kind.endswith("bias"):
        return 0.0, 0.0
    residual = kind in ("o", "down")
    return 0.0, config.init_std / (math.sqrt(2 * max(config.num_layers, 1)) if residual else 1.0)


def _draw(mean: float, std: float, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    if std == 0.0:
        return jnp.full(shape, mean, dtype)
    # Drawn in float32 so that a bfloat16 tree is the rounded float32 one.
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


@functools.lru_cache(maxsize=256)
def _leaf_program(
    mean: float, std: float, shape: tuple[int, ...], dtype: Any, sharding: Any
) -> Callable[[jax.Array, np.uint32], jax.Array]:
    def make(key: jax.Array, path_hash: np.uint32) -> jax.Array:
        return _draw(mean, std, jax.random.fold_in(key, path_hash), shape, dtype)

    return jax.jit(make, out_shardings=sharding)


def check_params(config: ModelConfig, params: Params) -> None:
    """Raises unless `params` has exactly the leaves and shapes that `config` asks for.

    Args:
      config: the model.
      params: its parameters, as arrays or `jax.ShapeDtypeStruct`s, of any floating dtype.

    Raises:
      ValueError: lists every missing, extra or misshapen leaf by path; arguments that are swapped
        or no config and no tree at all.
    """
    if not isinstance(config, ModelConfig) or not isinstance(params, Mapping):
        raise ValueError(
            "config must be a ModelConfig and params a dict of parameters, in this order, got "
            f"{type(config).__name__} and {type(params).__name__}"
        )
    expected, got = flatten(param_shapes(config)), flatten(params)
    problems: list[str] = []
    for path, spec in expected.items():
        if path not in got:
            problems.append(f"{path}: missing, expected shape {list(spec.shape)}")
        elif not hasattr(got[path], "shape"):
            problems.append(f"{path}: expected an array, got {type(got[path]).__name__}")
        elif tuple(got[path].shape) != spec.shape:
            problems.append(
                f"{path}: expected shape {list(spec.shape)}, got {list(got[path].shape)}"
            )
        elif not jnp.issubdtype(got[path].dtype, jnp.floating):
            problems.append(f"{path}: expected a floating dtype, got {got[path].dtype}")
    problems += [
        f"{path}: not in the config, shape {list(getattr(leaf, 'shape', ()))}"
        for path, leaf in got.items()
        if path not in expected
    ]
    if problems:
        raise ValueError("parameters do not fit the config:\n  " + "\n  ".join(problems))


def select(params: Params, pattern: str) -> dict[str, Any]:
    """Leaves whose path matches the regular expression `pattern` (`re.search`), by path.

    Raises:
      ValueError: nothing matches; lists some paths.
    """
    leaves = flatten(params)
    found = {p: leaf for p, leaf in leaves.items() if re.search(pattern, p)}
    if not found:
        raise ValueError(f"no path matches {pattern!r}; paths look like {list(leaves)[:5]}")
    return found


def count(params: Params) -> int:
    """Total number of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _stable_hash(name: str) -> int:
    # FNV-1a, 32 bits: the same in every process and Python version, unlike hash().
    value = 2166136261
    for byte in name.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value
