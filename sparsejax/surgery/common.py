"""What all operations share: a model taken apart into layers, put together, and its indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sparsejax.checks import listed, model_config, scalar
from sparsejax.config import FFNConfig, LayerConfig, ModelConfig
from sparsejax.params import check_params
from sparsejax.types import Params

Layers = int | Iterable[int]
"""One layer or several, by index."""

Runs = Iterable[Sequence[int]]
"""Runs of consecutive layers, each listing all of its layers."""


def take_apart(config: ModelConfig, params: Params) -> list[tuple[LayerConfig, Params]]:
    """(config, parameters) of every layer, after `check_params`; the dicts are the caller's own."""
    check_params(config, params)
    return [(layer, dict(params.get(f"layer_{i}", {}))) for i, layer in enumerate(config.layers)]


def put_together(
    config: ModelConfig, params: Params, layers: Iterable[tuple[LayerConfig, Params]]
) -> tuple[ModelConfig, Params]:
    """The model with these layers, numbered anew; everything else is shared with the old one."""
    layers = list(layers)
    new = {name: part for name, part in params.items() if not name.startswith("layer_")}
    new |= {f"layer_{i}": part for i, (_, part) in enumerate(layers) if part}
    config = config.replace(layers=tuple(layer for layer, _ in layers))
    check_params(config, new)
    return config, new


def layer_indices(function: str, config: ModelConfig, layers: Layers) -> tuple[int, ...]:
    """`layers` as distinct valid indices, in the order given.

    Raises:
      ValueError: an unknown layer, or one given twice; a config that is none.
    """
    model_config(function, config)
    layers = scalar(layers)
    given = list(layers) if isinstance(layers, Iterable) else [layers]
    indices = tuple(_index(function, "layers", config, i) for i in given)
    twice = [i for i in indices if indices.count(i) > 1]
    if twice:
        raise ValueError(f"{function}: layers names layer {twice[0]} more than once")
    return indices


def check_runs(
    function: str, argument: str, config: ModelConfig, runs: Runs
) -> tuple[tuple[int, ...], ...]:
    """`runs` as tuples of indices, each consecutive, ascending and of two layers or more.

    Raises:
      ValueError: an unknown layer, a run that is none, or two runs that share a layer; a config
        that is none.
    """
    model_config(function, config)
    runs = listed(function, argument, runs, "a list of runs of layers such as [range(2, 5)]")
    checked: list[tuple[int, ...]] = []
    owner: dict[int, int] = {}
    for k, run in enumerate(runs):
        name = f"{argument}[{k}]"
        if not isinstance(run, Iterable):
            raise ValueError(
                f"{function}: {argument} must be a list of runs of layers such as [range(2, 5)], "
                f"got {run!r} in the place of a run"
            )
        indices = tuple(_index(function, name, config, i) for i in run)
        if len(indices) < 2:
            raise ValueError(
                f"{function}: {name} must name two consecutive layers or more, got {list(indices)}"
            )
        if indices != tuple(range(indices[0], indices[0] + len(indices))):
            low, high = min(indices), max(indices)
            raise ValueError(
                f"{function}: {name} must list consecutive layers in ascending order, got "
                f"{list(indices)}; layers {low} to {high} are range({low}, {high + 1})"
            )
        for i in indices:
            if i in owner:
                raise ValueError(
                    f"{function}: {argument}[{owner[i]}] and {name} overlap in layer {i}; a layer "
                    "belongs to one run at most"
                )
            owner[i] = k
        checked.append(indices)
    return tuple(checked)


def ffn_of(function: str, config: ModelConfig, layer: int) -> FFNConfig:
    """The feed-forward part of a layer.

    Raises:
      ValueError: it has none; lists the layers that have.
    """
    ffn = config.layers[layer].ffn
    if ffn is None:
        raise ValueError(
            f"{function}: layer {layer} has no feed-forward part; layers with one: "
            f"{list(config.ffn_layers)}"
        )
    return ffn


def _index(function: str, argument: str, config: ModelConfig, value: Any) -> int:
    index = scalar(value)
    if isinstance(index, bool) or not isinstance(index, int):
        raise ValueError(f"{function}: {argument} must hold layer indices, got {value!r}")
    if not 0 <= index < config.num_layers:
        known = f"0 to {config.num_layers - 1}" if config.layers else "none at all"
        raise ValueError(
            f"{function}: {argument} names layer {index}, and the model's layers are {known}"
        )
    return index
