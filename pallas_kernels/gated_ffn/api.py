"""Public entry of the feed-forward op: contract, validation, choice of engine, gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import dispatch
from pallas_kernels.gated_ffn import config as configs
from pallas_kernels.gated_ffn import pallas_triton, reference
from pallas_kernels.gated_ffn.config import FFNConfig, Residuals
from pallas_kernels.gated_ffn.output import ACTIVATIONS, FFNOutput


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of one call (hashable: it is a non-differentiated argument)."""

    engine: str
    activation: str
    count_neurons: bool
    config: FFNConfig


def gated_ffn(
    x: Array,
    gate: Array | None,
    up: Array,
    down: Array,
    *,
    gate_bias: Array | None = None,
    activation: str = "relu",
    implementation: str | None = None,
    config: FFNConfig | None = None,
    count_neurons: bool = False,
    residuals: Residuals | None = None,
) -> FFNOutput:
    """y = h down with h = act(x gate^T + gate_bias) * (x up^T), for x (..., D) and weights (F, D).

    With `gate=None` the layer is not gated: h = act(x up^T + gate_bias). Weights are neuron-major:
    row n of `gate`, `up` and `down` is neuron n. A neuron is active on a token when its
    pre-activation is not <= 0 (so a NaN is active and reaches y).

    The result does not depend on sparsity: every engine is exact for any number of active neurons.
    A NaN in x reaches y, and so does an infinity, as itself or NaN, through any neuron that fires.
    One that does not fire adds 0 in the sparse engine, whatever its weights and x are; a NaN or
    infinity there reaches y (as 0 times NaN) in the dense engine, and in the sparse one only where
    a token, or a neuron that fires often, is computed densely, or where up to 64 tokens are decoded
    together and one of them fires that neuron.
    Gradients reach x, gate, up, down and gate_bias from both y and l1 (reverse mode; d|h|/dh is
    sign(h), and 0 at 0). Matmul precision of float32 inputs follows `jax.default_matmul_precision`.

    Args:
      x: (..., D), any number of leading dimensions, floating point.
      gate: (F, D) like x, or None for the non-gated form.
      up: (F, D), dtype of x.
      down: (F, D), dtype of x.
      gate_bias: optional (F,), dtype of x, added to the pre-activation.
      activation: "relu" (sparse) or "silu" / "gelu" (dense engine only).
      implementation: "xla" (dense), "triton" (on CUDA; dense or sparse on the device's own count,
        forward and backward), or None, which takes "triton" where it was measured to pay: bfloat16
        on Hopper, from 4,096 tokens and from D = 1,536 and F = 4,096 on. Arrays sharded over a mesh
        belong in `jax.shard_map` with "triton": nothing partitions the kernels.
      config: launch configuration of the triton engine; None takes its tuned default.
      residuals: what the triton engine keeps for its backward pass: "compact" (x and the lists, a
        tenth of what the dense engine keeps), or "full" (both projections too: a call that turned
        out dense then need not compute them again, 9 matmuls instead of 11); None takes `config`'s.
      count_neurons: also return `neuron_nnz`, the number of tokens on which each neuron fires.

    Returns:
      FFNOutput(y (..., D) like x, l1 (...) float32 = sum_n |h_n|, nnz (...) int32).

    Raises:
      ValueError: shapes or dtypes do not fit, or an unknown activation or implementation.
      UnsupportedError: the requested implementation cannot run this call.

    Source: gated ReLU feed-forward with L1, arXiv 2603.23198; GLU variants, arXiv 2002.05202.
    """
    _validate(x, gate, up, down, gate_bias, activation, residuals)
    chosen = engine(x, gate, up, activation, implementation)
    tokens, (features, width) = math.prod(x.shape[:-1]), up.shape
    config = config or configs.default(tokens, width, features, x.dtype)
    config = dataclasses.replace(config, residuals=residuals or config.residuals)
    call = _Call(chosen, activation, count_neurons, config)
    return _gated_ffn(call, x, gate, up, down, gate_bias)


def engine(x, gate, up, activation: str = "relu", implementation: str | None = None) -> str:
    """The engine that `gated_ffn` takes for these arguments: "xla" or "triton".

    Only shapes and dtypes of x, gate and up are read; `jax.ShapeDtypeStruct`s will do.

    Raises:
      ValueError: an unknown implementation.
      UnsupportedError: the requested implementation cannot run this call.
    """
    del gate
    reason = pallas_triton.unsupported(x, up, activation)
    if implementation is None and (reason is not None or not pallas_triton.pays(x, up)):
        return "xla"
    return dispatch.select("gated_ffn", implementation, {"triton": reason, "xla": None})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_ffn(call: _Call, x, gate, up, down, gate_bias) -> FFNOutput:
    return _run(call, x, gate, up, down, gate_bias, training=False)[0]


def _forward(call: _Call, x, gate, up, down, gate_bias):
    return _run(call, x, gate, up, down, gate_bias, training=True)


def _run(call: _Call, x, gate, up, down, gate_bias, *, training: bool):
    """(FFNOutput, what `_backward` needs)."""
    arrays = (x, gate, up, down, gate_bias)
    if call.engine == "xla":
        return reference.forward(
            *arrays, activation=call.activation, count_neurons=call.count_neurons
        )
    return pallas_triton.forward(
        *arrays, count_neurons=call.count_neurons, config=call.config, training=training
    )


def _backward(call: _Call, residuals, cotangent: FFNOutput):
    # The counts are integers: their cotangents are float0 and carry nothing.
    dy, dl1 = cotangent.y, cotangent.l1
    if call.engine == "xla":
        return reference.backward_kept(residuals, dy, dl1, activation=call.activation)
    rows = dy.reshape(-1, dy.shape[-1])
    dx, *grads = pallas_triton.backward(residuals, rows, dl1.reshape(-1), call.config)
    return dx.reshape(dy.shape), *grads


_gated_ffn.defvjp(_forward, _backward)


def _validate(x, gate, up, down, gate_bias, activation, residuals) -> None:
    if residuals is not None and residuals not in get_args(Residuals):
        raise ValueError(
            f"gated_ffn: residuals must be one of {list(get_args(Residuals))}, got {residuals!r}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"gated_ffn: activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}"
        )
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"gated_ffn: x must be a floating-point array (..., D), got {x.dtype}{list(x.shape)}"
        )
    if up.ndim != 2 or up.shape[1] != x.shape[-1]:
        raise ValueError(
            f"gated_ffn: up must be (F, D) with D = {x.shape[-1]} as in x, got {list(up.shape)}"
            + ("; weights are neuron-major, pass up.T" if up.shape[:1] == x.shape[-1:] else "")
        )
    expected = {"gate": (gate, up.shape), "down": (down, up.shape), "up": (up, up.shape)}
    expected["gate_bias"] = (gate_bias, up.shape[:1])
    for name, (array, shape) in expected.items():
        if array is None:
            continue
        if array.shape != shape:
            raise ValueError(
                f"gated_ffn: {name} must have shape {list(shape)} to go with up "
                f"{list(up.shape)}, got {list(array.shape)}"
            )
        if array.dtype != x.dtype:
            raise ValueError(
                f"gated_ffn: {name} must have x's dtype {x.dtype}, got {array.dtype}; "
                f"cast it with {name}.astype(x.dtype)"
            )
