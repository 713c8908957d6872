"""Energy from samples, and a meter over a stand-in for NVML."""

import sys
import time
import types

import jax
import pytest

from sparsejax.energy import PowerMeter, _nvml_name, trapezoid


def test_area_under_straight_lines():
    times, watts = [0.0, 1.0, 2.0, 4.0], [100.0, 300.0, 300.0, 100.0]
    assert trapezoid(times, watts, 0, 4) == 200 + 300 + 400
    assert trapezoid(times, watts, 0.5, 1.5) == 0.5 * 250 + 0.5 * 300
    assert trapezoid(times, watts, 2.5, 3.5) == 200  # between two samples
    assert trapezoid(times, watts, -1, 0) == 100 and trapezoid(times, watts, 4, 6) == 200
    assert trapezoid([1.0], [50.0], 0, 2) == 100
    with pytest.raises(ValueError, match="0 times, 1 watts"):
        trapezoid([], [1.0], 0, 1)


def fake_nvml(instant: bool) -> types.ModuleType:
    module = types.ModuleType("pynvml")
    reading = types.SimpleNamespace(nvmlReturn=0, value=types.SimpleNamespace(uiVal=500_000))
    names = {
        "NVML_SUCCESS": 0,
        "NVMLError": RuntimeError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetPowerUsage": lambda handle: 200_000,
        "nvmlDeviceGetFieldValues": lambda handle, fields: [reading],
    }
    if instant:
        names["NVML_FI_DEV_POWER_INSTANT"] = 186
    for name, value in names.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(("instant", "watts"), [(True, 500), (False, 200)])
def test_a_meter_takes_the_instantaneous_power_where_it_exists(monkeypatch, instant, watts):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(instant))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with PowerMeter(interval=0.001, device=0) as meter:
        begin = time.perf_counter()
        time.sleep(0.05)
        end = time.perf_counter()
    assert meter.reason is None
    assert meter.joules(begin, end) == pytest.approx(watts * (end - begin), rel=1e-6)


def test_the_card_that_cuda_shows(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _nvml_name(3) == 3 and _nvml_name(None) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-8f2a1c")
    assert _nvml_name(0) == 6 and _nvml_name(1) == "GPU-8f2a1c"


def test_without_a_card_there_is_a_reason(monkeypatch):
    with PowerMeter() as meter:
        pass
    assert meter.joules(0, 1) is None
    assert "no NVIDIA device" in meter.reason
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert PowerMeter().reason == "the package nvidia-ml-py is not installed"
    broken = fake_nvml(instant=True)

    def init():
        raise RuntimeError("library not found")

    broken.nvmlInit = init
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert PowerMeter(device=0).reason == "NVML: library not found"
