"""What a model costs to run, from its config alone: nothing is allocated, 405B takes milliseconds.

Every figure is a sum over parts (attention or feed-forward part of one layer, embedding, head), so
that layers can be chosen one by one (`layer_costs`, `sparsejax.analysis.select_architecture`).
A part takes the longer of its bytes over the memory's bandwidth and its FLOPs over the peak, a
fixed latency (`Device.step_latency`), and under tensor parallelism one all-reduce of its output.

Not counted: activations (in bytes and in memory), sampling and the gathering of logits, overlap of
one part with the next, and gains of layers that run side by side. Sparsity is not counted either:
a ReLU layer costs what a dense one does.

How near it comes: a decode step of an 8B model at context 1024 on one H200 took 4.90 ms at batch 1
(modelled: 4.43) and 6.44 ms at batch 32 (5.37); `experiments/check_cost.py` repeats that. Published
times of 405B and 253B models on eight H100 (another engine) are met within 5 %.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from sparsejax import params as params_lib
from sparsejax.analysis.choices import Choice, choice_of, chosen_layer
from sparsejax.analysis.devices import DEVICES, Device, get_device
from sparsejax.config import LayerConfig, ModelConfig
from sparsejax.model import flops_per_token

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclasses.dataclass(frozen=True)
class Cost:
    """A cost, or one part's share of it; costs add up field by field.

    Attributes:
      parameters: how many.
      parameter_bytes: of all devices together (each matrix once).
      kv_cache: bytes of keys and values of all rows at full context, each once.
      memory: bytes of parameters and cache on each device.
      flops_per_token: FLOPs of one decoded token at full context, of all devices together.
      bytes_per_step: bytes that each device reads and writes for one decode step.
      all_reduces: per forward pass; 0 on one device.
      latency: seconds of one decode step at full context.
      prefill_latency: seconds until the prompts are read.
    """

    parameters: int = 0
    parameter_bytes: float = 0.0
    kv_cache: float = 0.0
    memory: float = 0.0
    flops_per_token: float = 0.0
    bytes_per_step: float = 0.0
    all_reduces: int = 0
    latency: float = 0.0
    prefill_latency: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        fields = (f.name for f in dataclasses.fields(Cost))
        return Cost(**{n: getattr(self, n) + getattr(other, n) for n in fields})


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a model is run; see `estimate`."""

    device: Device
    batch: int
    context: int
    prompt: int
    tensor: int
    dtype: str
    cache_dtype: str


@dataclasses.dataclass(frozen=True)
class LayerCosts:
    """Costs of every choice for every layer, the input of `select_architecture`.

    Plain numbers: replace what you have measured, such as
    `costs.layers["latency"][3][Choice(False, 4096)] = 41e-6`.

    Attributes:
      fixed: {name: what is spent outside of the layers}.
      layers: {name: {layer: {choice: cost}}}.
    """

    fixed: dict[str, float]
    layers: dict[str, dict[int, dict[Choice, float]]]

    def total(self, name: str, choices: Iterable[Choice]) -> float:
        """Cost `name` of the model with these choices, one per layer."""
        table = self.layers[name]
        return math.fsum([self.fixed[name], *(table[i][c] for i, c in enumerate(choices))])


LIMITS = ("latency", "prefill_latency", "memory", "kv_cache", "parameters")


def estimate(
    config: ModelConfig,
    *,
    device: str | Device = "h200",
    batch: int = 1,
    context: int | None = None,
    prompt: int | None = None,
    tensor: int = 1,
    dtype: str | None = None,
    cache_dtype: str | None = None,
) -> Cost:
    """What it costs to run `config`: parameters, FLOPs, bytes, all-reduces, seconds.

    Args:
      config: the model.
      device: a name in `DEVICES`, or a `Device`.
      batch: rows decoded together.
      context: positions of each row that are in the cache, more than the model was made for too;
        None for `config.context_length`.
      prompt: positions of each row read in `prefill_latency`; None for `context`.
      tensor: devices that share every layer (tensor parallelism).
      dtype: of weights and products: "float32", "bfloat16", "float16" or "float8"; None for
        `config.dtype`.
      cache_dtype: of keys and values; None for `config.dtype`.

    Returns:
      Cost.

    Raises:
      ValueError: unknown names, numbers that are not positive, a dtype the device has no rate for.
    """
    setting = _setting(config, device, batch, context, prompt, tensor, dtype, cache_dtype)
    total = _outside(config, setting)
    for layer in config.layers:
        total += _layer(_core(config), _alone(layer), setting)
    return total


def layer_costs(
    config: ModelConfig,
    choices: Mapping[int, Iterable[Choice]],
    *,
    device: str | Device = "h200",
    batch: int = 1,
    context: int | None = None,
    prompt: int | None = None,
    tensor: int = 1,
    dtype: str | None = None,
    cache_dtype: str | None = None,
) -> LayerCosts:
    """The parts of `estimate` that limits can be set on, for every choice of every layer.

    Args:
      config: the model.
      choices: {layer: choices}, as `BlockScores.choices()` gives them.
      device, batch, context, prompt, tensor, dtype, cache_dtype: as for `estimate`.

    Returns:
      LayerCosts with the names in `LIMITS`.

    Raises:
      ValueError: as `estimate`, or choices that are not those of the config's layers.
    """
    if sorted(choices) != list(range(config.num_layers)):
        raise ValueError(
            f"layer_costs: choices must have the keys 0 to {config.num_layers - 1}, one for each "
            f"layer, got {sorted(choices)}"
        )
    setting = _setting(config, device, batch, context, prompt, tensor, dtype, cache_dtype)
    fixed = _outside(config, setting)
    layers: dict[str, dict[int, dict[Choice, float]]] = {name: {} for name in LIMITS}
    for i, layer in enumerate(config.layers):
        now = choice_of(layer)
        for choice in choices[i]:
            choice = Choice(*choice)
            if (choice.attention and not now.attention) or choice.d_ff > now.d_ff:
                raise ValueError(f"layer_costs: layer {i} is {now} and cannot become {choice}")
            cost = _layer(_core(config), _alone(chosen_layer(layer, choice)), setting)
            for name in LIMITS:
                layers[name].setdefault(i, {})[choice] = getattr(cost, name)
    return LayerCosts({name: getattr(fixed, name) for name in LIMITS}, layers)


def ffn_bytes(config: ModelConfig, layer: int, *, tensor: int = 1) -> float:
    """Bytes of a layer's feed-forward part on each of `tensor` devices, in `param_dtype`."""
    only = LayerConfig(attention=None, ffn=config.layers[layer].ffn)
    return _count(_core(config), only) * BYTES[config.param_dtype] / tensor


def _setting(
    config: ModelConfig,
    device: str | Device,
    batch: int,
    context: int | None,
    prompt: int | None,
    tensor: int,
    dtype: str | None,
    cache_dtype: str | None,
) -> Setting:
    context = config.context_length if context is None else context
    prompt = context if prompt is None else prompt
    numbers = {"batch": batch, "context": context, "prompt": prompt, "tensor": tensor}
    for name, value in numbers.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
            raise ValueError(f"cost: {name} must be a positive integer, got {value!r}")
    found = get_device(device)
    names = {"dtype": dtype or config.dtype, "cache_dtype": cache_dtype or config.dtype}
    for name, value in names.items():
        if value not in BYTES:
            raise ValueError(f"cost: {name} must be one of {list(BYTES)}, got {value!r}")
    if names["dtype"] not in found.flops:
        raise ValueError(
            f"cost: device {found.name} has no rate for products in {names['dtype']}; it has "
            f"{list(found.flops)}"
        )
    # With equal keys the parts of two calls are one computation.
    numbers = {name: int(value) for name, value in numbers.items()}
    return Setting(device=found, **numbers, **names)


def _core(config: ModelConfig) -> ModelConfig:
    return config.replace(layers=())


def _alone(layer: LayerConfig) -> LayerConfig:
    return dataclasses.replace(layer, parallel_with_previous=False)


def _layer(core: ModelConfig, layer: LayerConfig, setting: Setting) -> Cost:
    parts = (
        dataclasses.replace(layer, ffn=None),
        dataclasses.replace(layer, attention=None),
    )
    costs = (_part(core, p, setting) for p in parts if p.attention or p.ffn)
    return sum(costs, Cost())


def _part(core: ModelConfig, part: LayerConfig, setting: Setting) -> Cost:
    """Attention or feed-forward part of one layer."""
    s, a = setting, part.attention
    width, cache_width = BYTES[s.dtype], BYTES[s.cache_dtype]
    parameters = _count(core, part)
    kv = mine = 0.0
    if a is not None:
        # Keys and values of one position. A head is not split: few heads are copied.
        one = 2 * a.head_dim * cache_width
        kv, mine = a.num_kv_heads * one, math.ceil(a.num_kv_heads / s.tensor) * one
    weights = parameters * width / s.tensor
    rows = s.batch * s.context
    tokens = s.batch * s.prompt
    # A decoded token attends to the whole context, twice the mean of a causal pass of that length.
    flops = _flops(core, part, 2 * s.context)
    prefill_flops = _flops(core, part, s.prompt) * tokens
    step = weights + rows * mine + s.batch * mine
    output = core.d_model * BYTES[core.dtype]
    return Cost(
        parameters=parameters,
        parameter_bytes=parameters * width,
        kv_cache=rows * kv,
        memory=weights + rows * mine,
        flops_per_token=flops,
        bytes_per_step=step,
        all_reduces=int(s.tensor > 1),
        latency=_seconds(s, step, flops * s.batch, s.batch * output),
        prefill_latency=_seconds(s, weights + tokens * mine, prefill_flops, tokens * output),
    )


def _outside(config: ModelConfig, setting: Setting) -> Cost:
    """Embedding, final norm and head; the head reads one position of each row."""
    s, width = setting, BYTES[setting.dtype]
    core = _core(config)
    parameters = _count(core, None)
    flops = _flops(core, None, 1)
    head = config.vocab_size * config.d_model * width / s.tensor
    rows = s.batch * config.d_model * width
    seconds = _roofline(s, head + rows, flops * s.batch) + s.device.step_latency
    return Cost(
        parameters=parameters,
        parameter_bytes=parameters * width,
        memory=parameters * width / s.tensor,
        flops_per_token=flops,
        bytes_per_step=head + rows,
        latency=seconds,
        prefill_latency=seconds,
    )


def _seconds(setting: Setting, size: float, flops: float, output: float) -> float:
    device = setting.device
    fixed = device.step_latency + device.all_reduce(output, setting.tensor)
    return _roofline(setting, size, flops) + fixed


def _roofline(setting: Setting, size: float, flops: float) -> float:
    device = setting.device
    peak = device.flops[setting.dtype] * device.compute_share * setting.tensor
    return max(size / (device.memory_bandwidth * device.bandwidth_share), flops / peak)


@functools.lru_cache(maxsize=4096)
def _count(core: ModelConfig, part: LayerConfig | None) -> int:
    """Parameters of a part; None for what is outside of the layers."""
    if part is None:
        return params_lib.count(params_lib.param_shapes(core))
    tree: Any = params_lib.param_shapes(core.replace(layers=(part,)))
    return params_lib.count(tree.get("layer_0", {}))


@functools.lru_cache(maxsize=4096)
def _flops(core: ModelConfig, part: LayerConfig | None, length: int) -> float:
    """Forward FLOPs per token of a part in a causal pass: a third of a training token's."""
    outside = flops_per_token(core, length) / 3
    if part is None:
        return outside
    return flops_per_token(core.replace(layers=(part,)), length) / 3 - outside


__all__ = [
    "DEVICES",
    "LIMITS",
    "Cost",
    "Device",
    "LayerCosts",
    "estimate",
    "ffn_bytes",
    "get_device",
    "layer_costs",
]
