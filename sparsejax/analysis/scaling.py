"""Step time of sharded training against device count, from the config alone.

`estimate` turns the bytes of `sparsejax.analysis.traffic` into seconds: FLOPs at a share of the
peak that is measured on one device, the optimiser's bytes at memory bandwidth, and rings over the
slower of NVLink and network. Its two times bound the truth: `hidden` has weights and gradients
travel under the computation as far as that lasts, `exposed` not at all. Activations are never
hidden: the next product waits for them. Not modelled: products that become too small for the
device, waiting for the slowest one, trees in the place of rings, storage.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsejax import params as params_lib
from sparsejax.analysis.cost import BYTES
from sparsejax.analysis.devices import Device, get_device
from sparsejax.analysis.traffic import Term, traffic
from sparsejax.config import ModelConfig
from sparsejax.model import flops_per_token
from sparsejax.sharding import AXES, MeshConfig

_COMBINED = 32e6  # bytes that XLA puts into one collective, about, where nothing waits for them
_OPTIMISER_BYTES = 28  # parameter, two moments and gradient read, the first three written, float32


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts of equal devices.

    Attributes:
      device: a name in `DEVICES`, or a `Device`.
      devices_per_host: linked by `Device.link_bandwidth`.
      network_bandwidth: bytes/s of each device's own network adapter, in one direction; the default
        is 400 Gbit/s per GPU, as in the vendor's eight-GPU systems.
      network_hop: seconds of a hop between hosts; the default is NCCL's tuning model (hwLat of
        rings over network, Simple protocol).
      link_share: of the link's bandwidth that collectives of activations reach, while nothing else
        runs. Measured on two H200 (`2b`, tensor 2): 0.51 and 0.57.
      busy_link_share: the same for weights and gradients, beside which matrix products run and slow
        them. There: 0.31 and 0.39 (data 2), 0.21 and 0.24 (fsdp 2).
      network_share: of the network's bandwidth; assumed, not measured.
    """

    device: str | Device = "h200"
    devices_per_host: int = 8
    network_bandwidth: float = 50e9
    network_hop: float = 14e-6
    link_share: float = 0.55
    busy_link_share: float = 0.25
    network_share: float = 0.8

    def seconds(self, term: Term, sizes: Sequence[int]) -> float:
        """Of a term on a mesh whose last axis varies fastest over the devices of a host."""
        device = get_device(self.device)
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        index = tuple(slice(None) if a in term.axes else 0 for a in AXES)
        hosts = np.unique(ids[index].reshape(-1) // self.devices_per_host)
        n = ids[index].size
        if n == 1:
            return 0.0
        alone = term.what in ("activations", "statistics")
        bandwidth = device.link_bandwidth * (self.link_share if alone else self.busy_link_share)
        if len(hosts) > 1:
            together = n // len(hosts)
            network = together * self.network_bandwidth * self.network_share
            bandwidth = min(bandwidth, network)
        way = 2 if term.kind == "all-reduce" else 1
        between = way * (len(hosts) - 1)
        within = way * (n - 1) - between
        hops = within * device.allreduce_hop + between * self.network_hop
        calls = term.count
        if term.what != "activations":
            calls = min(calls, math.ceil(term.bytes / _COMBINED))
        return calls * (device.allreduce_base + hops) + term.sent(sizes) / bandwidth


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step under a split; seconds.

    Attributes:
      split: (data, fsdp, tensor).
      compute: FLOPs of one device over the rate it reaches.
      optimiser: its bytes over memory bandwidth.
      weights, gradients, activations, statistics: of the links.
      state_bytes: parameters and moments on each device.
      gathered_bytes: gathered weights that wait for the backward pass (without
        rematerialisation), on each device. Activations are not counted.
      tokens: of one update, all devices together.
    """

    split: tuple[int, int, int]
    compute: float
    optimiser: float
    weights: float
    gradients: float
    activations: float
    statistics: float
    state_bytes: float
    gathered_bytes: float
    tokens: int

    @property
    def exposed(self) -> float:
        """The step's seconds if nothing overlaps."""
        return self._inevitable + self.compute + self.weights + self.gradients

    @property
    def hidden(self) -> float:
        """The step's seconds if weights and gradients travel during the computation."""
        return self._inevitable + max(self.compute, self.weights + self.gradients)

    @property
    def _inevitable(self) -> float:
        return self.optimiser + self.activations + self.statistics

    @property
    def devices(self) -> int:
        """How many."""
        return math.prod(self.split)

    def tokens_per_s(self, overlap: bool = True) -> float:
        """Tokens per second of all devices together."""
        return self.tokens / (self.hidden if overlap else self.exposed)


def estimate(
    config: ModelConfig,
    split: Sequence[int],
    rows: int,
    length: int,
    *,
    cluster: Cluster = Cluster(),
    utilisation: float = 0.42,
    speedup: float = 1.0,
    remat: str = "none",
    accumulate: int = 1,
    sparse: bool = False,
) -> Step:
    """Seconds of one training step; see the module.

    Args:
      config, split, rows, length, remat, accumulate, sparse: as for `traffic`.
      cluster: devices and links.
      utilisation: share of the device's peak that a step of this model reaches on one device, model
        FLOPs counted, the optimiser's time not. The default is from `125m-dense` on one H200
        (42.0 % with the optimiser); wider models reach more (`2b` 51 %): measure and pass yours.
      speedup: of the step on one device against dense, for the sparse engine.

    Raises:
      ValueError: as `traffic`, numbers that are not positive, or a utilisation above 1.
    """
    for name, value in {"utilisation": utilisation, "speedup": speedup}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"estimate: {name} must be positive, got {value}")
    if utilisation > 1:
        raise ValueError(
            f"estimate: utilisation is a share of the device's peak, at most 1, got {utilisation}"
        )
    data, fsdp, tensor = split
    device, devices = get_device(cluster.device), math.prod(split)
    terms = traffic(config, split, rows, length, remat=remat, accumulate=accumulate, sparse=sparse)
    seconds: dict[str, float] = dict.fromkeys(
        ("weights", "gradients", "activations", "statistics"), 0.0
    )
    for term in _together(terms):
        seconds[term.what] += cluster.seconds(term, split)
    flops = flops_per_token(config, length)
    if remat == "full":
        # Another forward pass of the layers; the head's logits are computed once.
        flops += (flops - flops_per_token(config.replace(layers=()), length)) / 3
    rate = device.flops[config.dtype] * utilisation * speedup
    parameters = params_lib.count(params_lib.param_shapes(config))
    matrices = parameters / tensor * BYTES[config.dtype]
    memory = device.memory_bandwidth * device.bandwidth_share
    return Step(
        split=(data, fsdp, tensor),
        compute=flops * rows * length / devices / rate,
        optimiser=_OPTIMISER_BYTES * parameters / (fsdp * tensor) / memory,
        weights=seconds["weights"],
        gradients=seconds["gradients"],
        activations=seconds["activations"],
        statistics=seconds["statistics"],
        state_bytes=12 * parameters / (fsdp * tensor),
        gathered_bytes=matrices if fsdp > 1 and remat == "none" else 0.0,
        tokens=rows * length,
    )


def _together(terms: Sequence[Term]) -> list[Term]:
    """One term for all of a kind that go the same way; sizes become their mean."""
    groups: dict[tuple[str, str, tuple[str, ...]], list[Term]] = {}
    for term in terms:
        groups.setdefault((term.what, term.kind, term.axes), []).append(term)
    joined = []
    for key, members in groups.items():
        count = sum(term.count for term in members)
        joined.append(Term(*key, sum(term.bytes for term in members) / count, count))
    return joined


def splits(config: ModelConfig, devices: int, *, max_tensor: int = 8) -> list[tuple[int, int, int]]:
    """All (data, fsdp, tensor) of powers of two that multiply to `devices` and fit the model.

    Tensor has to divide heads, neurons and the vocabulary and stays within `max_tensor` (a host).
    """
    heads = [n for layer in config.layers if (a := layer.attention) for n in _heads(a)]
    widths = [layer.ffn.d_ff for layer in config.layers if layer.ffn is not None]
    by_tensor = math.gcd(config.vocab_size, *heads, *widths)
    powers = [2**i for i in range(devices.bit_length()) if devices % 2**i == 0]
    return [
        MeshConfig(-1, fsdp, tensor).sizes(devices)
        for tensor in powers
        if tensor <= max_tensor and by_tensor % tensor == 0
        for fsdp in powers
        if devices % (fsdp * tensor) == 0 and config.d_model % fsdp == 0
    ]


def _heads(attention: Any) -> tuple[int, int]:
    return attention.num_heads, attention.num_kv_heads


def plan(config: ModelConfig, devices: int, rows: int, length: int, **settings: Any) -> list[Step]:
    """`estimate` of every split that `rows` divide over, the fastest first; settings as there.

    Fastest by the mean of both bounds. Splits whose parameters, moments and gathered weights do
    not fit into the device's memory are left out.
    """
    cluster = settings.get("cluster", Cluster())
    memory = get_device(cluster.device).memory
    steps = [
        estimate(config, split, rows, length, **settings)
        for split in splits(config, devices, max_tensor=cluster.devices_per_host)
        if rows % (split[0] * split[1] * settings.get("accumulate", 1)) == 0
    ]
    steps = [step for step in steps if step.state_bytes + step.gathered_bytes < memory]
    return sorted(steps, key=lambda step: step.hidden + step.exposed)


def plan_rows(
    config: ModelConfig,
    devices: Sequence[int],
    batches: Sequence[int],
    length: int,
    *,
    reference: int,
    best: int = 3,
    **settings: Any,
) -> list[dict[str, Any]]:
    """`plan` as a table: the `best` splits of every device count.

    Args:
      config: the model.
      devices: counts.
      batches: sequences of an update, one number for each count.
      length: tokens per sequence.
      reference: sequences of the step on one device that efficiencies are relative to.
      best: splits per count.
      settings: of `estimate`.

    Returns:
      JSON values; times in ms, "efficiency" with nothing and with everything hidden.
    """
    one = estimate(config, (1, 1, 1), reference, length, **settings).tokens_per_s()
    rows = []
    for count, batch in zip(devices, batches, strict=True):
        for place, step in enumerate(plan(config, count, batch, length, **settings)[:best]):
            parts = ("compute", "optimiser", "weights", "gradients", "activations", "statistics")
            parts = (*parts, "hidden", "exposed")
            rows.append(
                {"devices": count, "sequences": batch, "place": place + 1, "split": step.split}
                | {f"{name}_ms": getattr(step, name) * 1e3 for name in parts}
                | {"efficiency": [step.tokens_per_s(o) / count / one for o in (False, True)]}
                | {"state_gb": step.state_bytes / 1e9, "gathered_gb": step.gathered_bytes / 1e9}
            )
    return rows
