"""Accelerators by name, with where every figure comes from.

Rates are the vendor's datasheet figures without structured sparsity. What datasheets do not say
was measured on H200 cards with XLA (jax 0.11.2), or is NCCL's own model, and is taken over for the
other devices; no figure was fitted to a published latency:

`bandwidth_share` 0.93, `step_latency` 16 us: a run of n gated FFNs (d 4096, d_ff 14336, bfloat16)
  at batch 1 takes 760 us for n = 8, 648 us fused into one; t = n * step + bytes / (share * rate).
`compute_share` 0.77: a gate projection (16,384 tokens, d 2048, d_ff 5632) at 759 of 989 TFLOP/s.
`allreduce_base` 6.6 us, `allreduce_hop` 0.6 us: NCCL's tuning model (src/graph/tuning.cc, baseLat
  and hwLat) of rings over NVLink with its LL protocol, 2 (n - 1) hops among n devices.

For two H200 the latter gives 7.8 us. The same run of FFNs on two cards takes 26 us per step, 10 us
more than on one. Servers with an all-reduce of their own are faster than NCCL.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping

from sparsejax.hardware import PEAK_BF16_FLOPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator and its links to the others of its host.

    Attributes:
      name: what it is called.
      flops: FLOP/s of dense matrix products by the dtype of their inputs.
      memory: bytes.
      memory_bandwidth: bytes/s.
      link_bandwidth: bytes/s to the other devices, in one direction.
      bandwidth_share: share of `memory_bandwidth` that reading weights reaches.
      compute_share: share of `flops` that large matrix products reach.
      step_latency: seconds that one part of a layer takes beyond its bytes and FLOPs: launches,
        ramp-up, norm.
      allreduce_base, allreduce_hop: seconds of an all-reduce beyond its bytes: once, and for each
        of the 2 (n - 1) hops of a ring of n devices.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    bandwidth_share: float = 0.93
    compute_share: float = 0.77
    step_latency: float = 16e-6
    allreduce_base: float = 6.6e-6
    allreduce_hop: float = 0.6e-6

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            rates = value.values() if isinstance(value, Mapping) else [value]
            for rate in rates:
                if not isinstance(rate, str) and not 0 <= rate < math.inf:
                    raise ValueError(f"Device: {field.name} must be finite, got {value}")

    def all_reduce(self, size: float, devices: int) -> float:
        """Seconds of an all-reduce of `size` bytes among `devices` devices, as a ring."""
        if devices == 1:
            return 0.0
        hops = 2 * (devices - 1)
        transfer = hops / devices * size / self.link_bandwidth
        return self.allreduce_base + hops * self.allreduce_hop + transfer


def _device(name: str, bf16: float, tf32: float, fp8: float | None, **rest: float) -> Device:
    # float32 products run as TF32, XLA's default on these cards.
    flops = {"bfloat16": bf16, "float16": bf16, "float32": tf32}
    return Device(name=name, flops=flops | ({} if fp8 is None else {"float8": fp8}), **rest)


# The SXM (HGX) forms, by the datasheets "NVIDIA A100 Tensor Core GPU" (80 GB), "NVIDIA H100 Tensor
# Core GPU", "NVIDIA H200 Tensor Core GPU" and "NVIDIA HGX B200". Rates that they give with sparsity
# are halved here, and NVLink, which they give as the sum of both directions, too.
DEVICES = {
    "a100": _device(
        "a100",
        PEAK_BF16_FLOPS["A100"],
        156e12,
        None,
        memory=80e9,
        memory_bandwidth=2.039e12,
        link_bandwidth=300e9,
    ),
    "h100": _device(
        "h100",
        PEAK_BF16_FLOPS["H100"],
        494.5e12,
        1979e12,
        memory=80e9,
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
    ),
    "h200": _device(
        "h200",
        PEAK_BF16_FLOPS["H200"],
        494.5e12,
        1979e12,
        memory=141e9,
        memory_bandwidth=4.8e12,
        link_bandwidth=450e9,
    ),
    "b200": _device(
        "b200",
        PEAK_BF16_FLOPS["B200"],
        1100e12,
        4500e12,
        memory=180e9,
        memory_bandwidth=8e12,
        link_bandwidth=900e9,
    ),
}


def get_device(device: str | Device) -> Device:
    """The device called `device`, or itself.

    Raises:
      ValueError: no such name; lists the known ones.
    """
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        close = difflib.get_close_matches(str(device), DEVICES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"unknown device {device!r}{hint}; known: {', '.join(DEVICES)}; or pass a "
            "sparsejax.analysis.cost.Device"
        )
    return DEVICES[device]
