"""Helpers for tests of the kernels: inputs with traps, error budgets, "this engine really ran"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractDevice, AbstractMesh


def lower_for_cuda(function: Callable[..., Any], *avals: Any) -> str:
    """Text of `jit(function)` lowered for CUDA, on a machine with or without a GPU."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*avals)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def assert_kernels(text: str, *names: str) -> None:
    """Raises AssertionError unless the lowered text calls every kernel named."""
    missing = [name for name in names if f'name = "{name}"' not in text]
    assert not missing, f"kernels {missing} are not in the lowered program"


def assert_close(actual: Array, expected: Array) -> None:
    """float32 budget: rtol 2e-5, and atol 2e-5 of the largest expected magnitude."""
    got, wanted = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    scale = np.max(np.abs(np.where(np.isfinite(wanted), wanted, 0)), initial=0.0)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5 * scale)


def assert_as_exact_as_dense(actual: Array, dense: Array, wide: Array, factor: float = 1.5) -> None:
    """Low-precision budget: RMS error against float32 at most `factor` that of the dense path."""
    truth = np.asarray(wide, np.float32)
    error, budget = (
        np.sqrt(np.mean((np.asarray(a.astype(jnp.float32)) - truth) ** 2)) for a in (actual, dense)
    )
    assert error <= factor * budget, f"RMS error {error:.3e}, dense path {budget:.3e}"


def ffn_inputs(
    tokens: int, width: int, features: int, *, dtype: Any = jnp.float32, rate: float = 0.2
) -> dict[str, Array]:
    """x, gate, up, down, gate_bias with rows of every kind.

    Row 0 has no active neuron, row 1 all of them, every eighth from 2 about half (a long row), the
    others a share of about `rate`. The first third of the neurons fires most.
    """
    rng = np.random.default_rng(tokens * 7919 + width * 31 + features)
    x = rng.standard_normal((tokens, width))
    gate, up, down = rng.standard_normal((3, features, width)) * width**-0.5
    bias = rng.standard_normal(features) * 0.1
    gate[:, 0] = np.where(np.arange(features) < features // 3, 0.8, 1.2)
    threshold = {0.2: -1.0, 0.05: -1.8}[rate]
    x[:, 0] = threshold
    x[2::8, 0] = 0.0
    x[0, 0], x[1 % tokens, 0] = -50.0, 50.0
    arrays = {"x": x, "gate": gate, "up": up, "down": down, "gate_bias": bias}
    return {name: jnp.asarray(value, dtype) for name, value in arrays.items()}
