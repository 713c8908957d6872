"""On a real card: gradients of every way against float32, and the same bits twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_ffn
from pallas_kernels.testing import assert_as_exact_as_dense, assert_close, ffn_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


def gradients(inputs, implementation, gated, residuals=None):
    """(gradients by name, (nnz, whether the call ran sparse))."""
    dy = jax.random.normal(jax.random.key(0), inputs["x"].shape)

    def loss(inputs):
        gate_bias, rest = inputs["gate_bias"], {k: inputs[k] for k in inputs if k != "gate_bias"}
        if not gated:  # the thresholds of `ffn_inputs` sit in gate
            rest |= {"up": rest["gate"], "gate": None}
        options = {"implementation": implementation, "residuals": residuals}
        out = gated_ffn(**rest, gate_bias=gate_bias, **options)
        total = jnp.sum(dy * out.y.astype(jnp.float32)) + 0.1 * jnp.sum(out.l1)
        return total, (out.nnz, out.sparse)

    return jax.jit(jax.grad(loss, has_aux=True))(inputs)


@pytest.mark.parametrize(
    ("tokens", "width", "features", "gated", "hot", "rows"),
    [
        (2100, 768, 2048, True, False, "short"),
        (2100, 768, 2048, True, False, "long"),
        # The forward pass sparse, the backward pass dense, with what the forward pass kept.
        (4096, 2048, 5632, True, False, "many long, full"),
        (2100, 768, 2048, True, True, "short"),
        (2100, 2560, 3001, True, True, "long"),
        (4096, 1040, 5632, False, True, "short"),
        (2048, 4096, 3000, True, False, "long"),
        # Columns of 16 bits whose highest is set, and of 32 bits.
        (2048, 256, 40_000, True, False, "short"),
        (2048, 256, 70_000, True, False, "short"),
    ],
)
def test_bfloat16(tokens, width, features, gated, hot, rows):
    inputs = ffn_inputs(tokens, width, features, dtype=jnp.bfloat16, rate=0.05)
    if rows == "short":
        inputs["x"] = inputs["x"].at[:, 0].set(-2.0 if features < 8192 else -3.6)
    if rows.startswith("many"):
        inputs["x"] = inputs["x"].at[:, 0].set(-3.0).at[::3, 0].set(0.0)
    residuals = "full" if rows.endswith("full") else None
    if hot:
        inputs["gate_bias"] = inputs["gate_bias"].at[5 :: features // 30].add(3.0)
    got, (nnz, sparse) = gradients(inputs, "triton", gated, residuals)
    assert sparse or not rows.startswith("many")
    again, _ = gradients(inputs, "triton", gated, residuals)
    dense, _ = gradients(inputs, "xla", gated)
    with jax.default_matmul_precision("highest"):
        wide = {k: v.astype(jnp.float32) for k, v in inputs.items()}
        truth, _ = gradients(wide, "xla", gated)
    assert (int(nnz.max()) > 256) == ("long" in rows)
    for name in truth:
        if gated or name != "up":
            assert_as_exact_as_dense(got[name], dense[name], truth[name], factor=1.2)
            np.testing.assert_array_equal(np.array(got[name]), np.array(again[name]))


def test_float32():
    inputs = ffn_inputs(3000, 512, 1000, rate=0.05)
    with jax.default_matmul_precision("highest"):
        got, _ = gradients(inputs, "triton", True)
        expected, _ = gradients(inputs, "xla", True)
    for name, gradient in expected.items():
        assert_close(got[name], gradient)
