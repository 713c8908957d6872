"""What devices can do (peak matmul rates, memory), and what a compiled program needs of it."""

from __future__ import annotations

from typing import Any

import jax

# Dense bfloat16 FLOP/s by the vendors' datasheets; the longest matching name wins.
PEAK_BF16_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def peak_flops(kind: str | None = None) -> float | None:
    """Datasheet bfloat16 FLOP/s of a device kind (default: the first device's), or None."""
    kind = jax.devices()[0].device_kind if kind is None else kind
    known = [name for name in PEAK_BF16_FLOPS if name in kind]
    return PEAK_BF16_FLOPS[max(known, key=len)] if known else None


def utilisation(flops_per_token: float, tokens_per_s: float, num_devices: int) -> float | None:
    """Model FLOPs utilisation: model FLOP/s over peak FLOP/s of all devices; None if unknown."""
    peak = peak_flops()
    return None if peak is None else flops_per_token * tokens_per_s / (peak * num_devices)


def memory_needed(compiled: Any) -> dict[str, int]:
    """Bytes of a compiled program on one device: its parts, and as "peak" what is alive at most."""
    sizes = compiled.memory_analysis()
    names = ("argument", "output", "temp", "alias")
    parts = {name: getattr(sizes, f"{name}_size_in_bytes") for name in names}
    return parts | {"peak": sum(parts.values()) - 2 * parts["alias"]}


def memory_limit() -> int | None:
    """Bytes that programs may take on this process' first device; None where it does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
