"""Energy of a piece of work on one NVIDIA card, from power samples taken in a thread."""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax


def trapezoid(times: Sequence[float], watts: Sequence[float], begin: float, end: float) -> float:
    """Joules from `begin` to `end`: the area under straight lines between the samples.

    Outside of the samples the first or last value goes on.
    """
    if not times or len(times) != len(watts):
        raise ValueError(f"trapezoid: expected samples, got {len(times)} times, {len(watts)} watts")

    def at(t: float) -> float:
        for i in range(1, len(times)):
            if times[i - 1] <= t <= times[i]:
                share = (t - times[i - 1]) / max(times[i] - times[i - 1], 1e-12)
                return watts[i - 1] + share * (watts[i] - watts[i - 1])
        return watts[0] if t < times[0] else watts[-1]

    inside = [(t, w) for t, w in zip(times, watts, strict=True) if begin < t < end]
    points = [(begin, at(begin)), *inside, (end, at(end))]
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))


def _nvml_name(index: int | None) -> int | str:
    """NVML's index or UUID of the card that CUDA counts as `index`: NVML shows hidden cards too."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not shown:
        return index or 0
    entry = shown.split(",")[index or 0].strip()
    return int(entry) if entry.isdigit() else entry


class PowerMeter:
    """Samples a card's power while its `with` block runs.

    NVML's plain power reading is a mean over the last second on recent cards; the instantaneous
    one is read where it exists. `joules` works inside the block and after it.

    Args:
      interval: seconds between samples.
      device: index of the card among those NVML shows; None takes jax's first device.

    Attributes:
      reason: why there is no measurement, or None.
    """

    def __init__(self, interval: float = 0.02, device: int | None = None):
        self._interval, self._times, self._watts = interval, [], []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._read: Any = None
        self.reason = self._open(device)

    def _open(self, device: int | None) -> str | None:
        if jax.default_backend() != "gpu":
            return f"no NVIDIA device, jax runs on {jax.default_backend()!r}"
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return "the package nvidia-ml-py is not installed"
        name = _nvml_name(jax.local_devices()[0].local_hardware_id) if device is None else device
        by = "UUID" if isinstance(name, str) else "Index"
        instant = getattr(nvml, "NVML_FI_DEV_POWER_INSTANT", None)

        def read() -> float:
            if instant is not None:
                (field,) = nvml.nvmlDeviceGetFieldValues(handle, [instant])
                if field.nvmlReturn == nvml.NVML_SUCCESS:
                    return field.value.uiVal / 1e3
            return nvml.nvmlDeviceGetPowerUsage(handle) / 1e3

        try:
            nvml.nvmlInit()
            handle = getattr(nvml, f"nvmlDeviceGetHandleBy{by}")(name)
            read()
        except nvml.NVMLError as error:
            return f"NVML: {error}"
        self._read = read
        return None

    def __enter__(self) -> PowerMeter:
        if self._read is not None:
            self._sample()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        watts = self._read()
        # Time after the value: a reader never sees more times than values.
        self._watts.append(watts)
        self._times.append(time.perf_counter())

    def joules(self, begin: float, end: float) -> float | None:
        """Energy between two readings of `time.perf_counter`; None where nothing is measured."""
        if self._read is None:
            return None
        count = len(self._times)
        return trapezoid(self._times[:count], self._watts[:count], begin, end)
