"""FFN fusion: a run of feed-forward layers becomes one wide layer, and the way back.

Feed-forward layers that read the same input add up to one feed-forward layer, whose neurons are all
of theirs: rows of gate, up and down (and gate biases) are concatenated in layer order, and the sum
over layers is the sum over neurons that `down` takes anyway. That step is exact. What makes fusing
an approximation is that the layers of a model read *different* inputs, each the output of the one
before. `parallelize_blocks` is this approximation alone, layers kept apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.checks import listed, whole_number
from sparsejax.config import FFNConfig, LayerConfig, ModelConfig
from sparsejax.surgery import leaves
from sparsejax.surgery.common import (
    Runs,
    check_runs,
    ffn_of,
    layer_indices,
    put_together,
    take_apart,
)
from sparsejax.types import Params

Norm = Literal["last", "fold"]


@dataclasses.dataclass(frozen=True)
class FusionReport:
    """Where each layer went when runs were fused.

    Attributes:
      old_to_new: for each layer before, its layer after.
      new_to_old: for each layer after, the layers before that it stands for, in order. The hidden
        state after it corresponds to the one after the last of them (for distillation).
    """

    old_to_new: tuple[int, ...]
    new_to_old: tuple[tuple[int, ...], ...]


def plan_fusion(config: ModelConfig, groups: Runs) -> tuple[ModelConfig, FusionReport]:
    """The config that `fuse_ffns` returns for these groups, and where each layer goes.

    Args:
      config: the model.
      groups: as for `fuse_ffns`.

    Returns:
      (config, report).

    Raises:
      ValueError: as `fuse_ffns`.
    """
    runs = {group[0]: group for group in _check_groups(config, groups)}
    new_layers, new_to_old, i = [], [], 0
    while i < config.num_layers:
        run = runs.get(i, (i,))
        new_layers.append(_fused_layer(config, run) if i in runs else config.layers[i])
        new_to_old.append(run)
        i += len(run)
    old_to_new = tuple(new for new, run in enumerate(new_to_old) for _ in run)
    report = FusionReport(old_to_new=old_to_new, new_to_old=tuple(new_to_old))
    return config.replace(layers=tuple(new_layers)), report


def fuse_ffns(
    config: ModelConfig,
    params: Params,
    groups: Runs,
    norm: Norm = "last",
    *,
    donate: bool = False,
) -> tuple[ModelConfig, Params]:
    """y = x + sum_k FFN_k(norm_k(x)): the layers k of each group become one layer of all neurons.

    x is the input of the group's first layer. The result is, to rounding, the model in which the
    other layers of each group are `parallel_with_previous` (`parallelize_blocks` with the same
    groups) and in which

      norm="last": every norm_k is that of the group's last feed-forward layer (the published rule);
      norm="fold": every norm_k is layer k's own. Its scale s_k moves into the columns that meet it,
        gate_k diag(s_k) and up_k diag(s_k), and the fused layer's own scale is one. No scale is
        divided by, so zeros are no exception. Products round once to the parameters' dtype.

    The fused layer takes the place of its group and later layers are renumbered; all groups are
    given in the numbers before, and `plan_fusion` tells the new ones. Widths may differ. Gate
    biases are concatenated (zeros for layers without, where some have one). Layers with neither
    attention nor feed-forward part may lie in a group; they add nothing and are gone afterwards.

    Attention inside a run would have to see the sum before it exists, so no layer of a group may
    have one; `remove_attention` first. The published choice leaves the last layer of an
    attention-free run out of its group, because it is unusually sensitive.

    Args:
      config: the model.
      params: its parameters, as arrays, sharded arrays, tracers or `jax.ShapeDtypeStruct`s.
      groups: runs of consecutive layers that list all their layers, such as [range(66, 74)].
      norm: "last" or "fold".
      donate: free each old leaf as soon as its successor exists, so that beside the tree no more
        than one fused leaf is held. The old tree is unusable afterwards.

    Returns:
      (config, params).

    Raises:
      ValueError: unknown or non-consecutive layers, a group of one, groups that overlap, attention
        inside a group, no feed-forward part in it, or gated layers, activations or dtypes mixed.

    Source: FFN Fusion, arXiv 2503.18908 (norm="last").
    """
    name = "fuse_ffns"
    if norm not in ("last", "fold"):
        raise ValueError(f"{name}: norm must be 'last' or 'fold', got {norm!r}")
    new_config, report = plan_fusion(config, groups)
    parts = take_apart(config, params)
    runs = [run for run in report.new_to_old if len(run) > 1]
    for run in runs:
        _check_dtypes([(i, parts[i][1]) for i in run])
        width = ffn_of(name, new_config, report.old_to_new[run[0]]).d_ff
        for i in run:
            for leaf_name, leaf in parts[i][1].get("ffn", {}).items():
                path = f"layer_{i}/ffn/{leaf_name}"
                leaves.check_divides(name, f"run {list(run)}", leaf, path, 0, width)
    donated = leaves.Donated(name, params, donate)
    fused = {run[0]: _fuse(config, run, parts, norm, donated) for run in runs}
    new_parts = [fused.get(run[0], parts[run[0]][1]) for run in report.new_to_old]
    return put_together(new_config, params, zip(new_config.layers, new_parts, strict=True))


def split_ffn(
    config: ModelConfig,
    params: Params,
    layer: int,
    widths: Sequence[int],
    *,
    donate: bool = False,
) -> tuple[ModelConfig, Params]:
    """FFN(norm(x)) = sum_k FFN_k(norm(x)): consecutive neurons become layers; `fuse_ffns` undone.

    The first part stays in the layer's place, the others follow it with `parallel_with_previous`
    and copies of its norm, and later layers are renumbered. So the function is unchanged, also
    where the layer came from sequential ones: those read each other's outputs, which no weights
    remember.

    `split_ffn(*fuse_ffns(config, params, [run]), run[0], widths_of_run)` is the identity, bit for
    bit, where the layers of the run were `parallel_with_previous` but the first, had equal norm
    scales, and either all or none a gate bias (norm="last"). From sequential layers it gives back
    the same weights in the same places, with the flags set.

    Args:
      config: the model.
      params: its parameters, as arrays, sharded arrays, tracers or `jax.ShapeDtypeStruct`s.
      layer: a layer with a feed-forward part and without attention (a part would read x, not
        x + attention).
      widths: neurons of each part, two or more; they add up to the layer's d_ff.
      donate: free each old leaf as soon as its successors exist. The old tree is unusable then.

    Returns:
      (config, params).

    Raises:
      ValueError: an unknown layer, one with attention or without feed-forward part, or widths that
        do not add up or that the mesh axis that splits the neurons does not divide.
    """
    name = "split_ffn"
    (index,) = layer_indices(name, config, [layer])
    ffn = ffn_of(name, config, index)
    if config.layers[index].attention is not None:
        raise ValueError(
            f"{name}: layer {index} has attention, whose output only the first part would read; "
            f"remove it first: remove_attention(config, params, {index})"
        )
    given = listed(name, "widths", widths, "a list of two numbers of neurons or more")
    sizes = tuple(whole_number(name, f"widths[{k}]", w) for k, w in enumerate(given))
    if len(sizes) < 2 or sum(sizes) != ffn.d_ff:
        raise ValueError(
            f"{name}: widths must be two or more that add up to layer {index}'s d_ff = {ffn.d_ff}, "
            f"got {list(sizes)} = {sum(sizes)}"
        )
    parts = take_apart(config, params)
    old_layer, part = parts[index]
    for leaf_name, leaf in part["ffn"].items():
        for k, size in enumerate(sizes):
            path = f"layer_{index}/ffn/{leaf_name}"
            leaves.check_divides(name, f"widths[{k}] = {size}", leaf, path, 0, size)
    donated = leaves.Donated(name, params, donate)
    pieces: list[Params] = [{} for _ in sizes]
    for leaf_name, leaf in part["ffn"].items():
        path = f"layer_{index}/ffn/{leaf_name}"
        cut = leaves.run(_cut, [leaf], static=sizes, path=path)
        donated.free([leaf], made=cut)
        for piece, value in zip(pieces, cut, strict=True):
            piece[leaf_name] = value
    scale, path = part["ffn_norm"]["scale"], f"layer_{index}/ffn_norm/scale"
    new = []
    for k, (size, piece) in enumerate(zip(sizes, pieces, strict=True)):
        # Copies: two paths to one array could not be donated to a training step.
        own = leaves.run(_copy, [scale], path=path) if k else scale
        part_config = LayerConfig(
            attention=None,
            ffn=dataclasses.replace(ffn, d_ff=size),
            parallel_with_previous=old_layer.parallel_with_previous or k > 0,
        )
        new.append((part_config, {"ffn_norm": {"scale": own}, "ffn": piece}))
    return put_together(config, params, [*parts[:index], *new, *parts[index + 1 :]])


def _check_groups(config: ModelConfig, groups: Runs) -> tuple[tuple[int, ...], ...]:
    name = "fuse_ffns"
    runs = check_runs(name, "groups", config, groups)
    for k, run in enumerate(runs):
        for i in run:
            if config.layers[i].attention is not None:
                raise ValueError(
                    f"{name}: groups[{k}] = {list(run)} has attention inside, in layer {i}; only "
                    "attention-free layers become one: remove_attention(config, params, "
                    f"{[j for j in run if config.layers[j].attention is not None]}) or leave "
                    "layers out"
                )
        kinds: dict[tuple[bool, str], int] = {}
        for i in run:
            ffn = config.layers[i].ffn
            if ffn is not None:
                kinds.setdefault((ffn.gated, ffn.activation), i)
        if not kinds:
            raise ValueError(
                f"{name}: groups[{k}] = {list(run)} would give an empty layer: none of them has a "
                "feed-forward part"
            )
        if len(kinds) > 1:
            told = "; ".join(
                f"layer {i} is {'gated' if gated else 'not gated'} {activation}"
                for (gated, activation), i in kinds.items()
            )
            raise ValueError(
                f"{name}: groups[{k}] = {list(run)} mixes kinds of feed-forward layers, which are "
                f"not one layer: {told}; group layers of one kind"
            )
    return runs


def _fused_layer(config: ModelConfig, run: tuple[int, ...]) -> LayerConfig:
    ffns = [ffn for i in run if (ffn := config.layers[i].ffn) is not None]
    return LayerConfig(
        attention=None,
        ffn=FFNConfig(
            d_ff=sum(ffn.d_ff for ffn in ffns),
            gated=ffns[0].gated,
            activation=ffns[0].activation,
            gate_bias=any(ffn.gate_bias for ffn in ffns),
        ),
        parallel_with_previous=config.layers[run[0]].parallel_with_previous,
    )


def _check_dtypes(parts: list[tuple[int, Params]]) -> None:
    first: dict[str, tuple[int, Any]] = {}
    for i, part in parts:
        for name, leaf in part.get("ffn", {}).items():
            layer, dtype = first.setdefault(name, (i, leaf.dtype))
            if leaf.dtype != dtype:
                raise ValueError(
                    f"fuse_ffns: layer_{layer}/ffn/{name} is {dtype} and layer_{i}/ffn/{name} is "
                    f"{leaf.dtype}; cast one of them first, with .astype"
                )


def _fuse(
    config: ModelConfig,
    run: tuple[int, ...],
    parts: list[tuple[LayerConfig, Params]],
    norm: Norm,
    donated: leaves.Donated,
) -> Params:
    """The parameters of the one layer that stands for `run`."""
    members = [parts[i][1] for i in run if config.layers[i].ffn is not None]
    if len(members) == 1:
        return members[0]
    scales = [member["ffn_norm"]["scale"] for member in members]
    widths = [member["ffn"]["up"].shape[0] for member in members]
    fused: Params = {}
    for name in sorted(set().union(*(member["ffn"] for member in members))):
        found = [member["ffn"].get(name) for member in members]
        sources = [leaf for leaf in found if leaf is not None]
        # The rows in order: the next source, or so many zeros.
        pattern = tuple(w if leaf is None else 0 for w, leaf in zip(widths, found, strict=True))
        operands = scales if norm == "fold" and name in ("gate", "up") else ()
        path = f"layer_{run[0]}/ffn/{name}"
        fused[name] = leaves.run(_stack, sources, operands, pattern, path=path)
        donated.free(sources, made=fused[name])
    scale = scales[-1]
    if norm == "fold":
        path = f"layer_{run[0]}/ffn_norm/scale"
        scale = leaves.run(_ones, [scale], path=path)
    dropped = scales if norm == "fold" else scales[:-1]
    donated.free(dropped, made=fused)
    return {"ffn_norm": {"scale": scale}, "ffn": fused}


def _stack(
    sources: tuple[jax.Array, ...], operands: tuple[jax.Array, ...], *, static: tuple[int, ...]
) -> jax.Array:
    """Sources one under the other, their columns times the operands, with zeros in between."""
    if operands:
        sources = tuple(_scaled(x, s) for x, s in zip(sources, operands, strict=True))
    following = iter(sources)
    rest, dtype = sources[0].shape[1:], sources[0].dtype
    rows = [jnp.zeros((n, *rest), dtype) if n else next(following) for n in static]
    return jnp.concatenate(rows)


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * scale.astype(jnp.float32)).astype(x.dtype)


def _cut(
    sources: tuple[jax.Array], operands: tuple[()], *, static: tuple[int, ...]
) -> tuple[jax.Array, ...]:
    return tuple(jnp.split(sources[0], np.cumsum(static)[:-1].tolist()))


def _copy(sources: tuple[jax.Array], operands: tuple[()], *, static: tuple[()]) -> jax.Array:
    return jnp.copy(sources[0])


def _ones(sources: tuple[jax.Array], operands: tuple[()], *, static: tuple[()]) -> jax.Array:
    return jnp.ones_like(sources[0])
