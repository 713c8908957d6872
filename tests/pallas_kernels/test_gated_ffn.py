"""`gated_ffn`, dense engine: values and gradients against autodiff of the written-out formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedError, dispatch, gated_ffn

ACT = {"relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}


def inputs(shape=(3, 5), d=16, f=33, gated=True, bias=True, seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    x = jax.random.normal(keys[0], (*shape, d))
    gate, up, down = (jax.random.normal(k, (f, d)) / d**0.5 for k in keys[1:4])
    return (
        x,
        gate if gated else None,
        up,
        down,
        (0.3 * jax.random.normal(keys[4], (f,)) if bias else None),
    )


def formula(x, gate, up, down, bias, activation):
    """The plain formula: y, l1."""
    pre = x @ (up if gate is None else gate).T
    pre = pre if bias is None else pre + bias
    h = ACT[activation](pre)
    h = h if gate is None else h * (x @ up.T)
    return h @ down, jnp.abs(h).sum(-1), pre


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(activation, gated, bias):
    args = inputs(gated=gated, bias=bias)
    out = gated_ffn(*args[:4], gate_bias=args[4], activation=activation, count_neurons=True)
    y, l1, pre = formula(*args, activation)
    np.testing.assert_allclose(out.y, y, rtol=2e-5, atol=2e-5 * np.abs(y).max())
    np.testing.assert_allclose(out.l1, l1, rtol=2e-5)
    active = np.asarray(pre) > 0 if activation == "relu" else np.asarray(pre) != 0
    np.testing.assert_array_equal(out.nnz, active.sum(-1))
    np.testing.assert_array_equal(out.neuron_nnz, active.sum((0, 1)))
    assert out.nnz.dtype == jnp.int32 and out.l1.dtype == jnp.float32

    wy = jax.random.normal(jax.random.key(7), y.shape)
    wl = jax.random.normal(jax.random.key(8), l1.shape)

    def ours(args):
        o = gated_ffn(*args[:4], gate_bias=args[4], activation=activation)
        return jnp.sum(o.y * wy) + jnp.sum(o.l1 * wl)

    def theirs(args):
        y, l1, _ = formula(*args, activation)
        return jnp.sum(y * wy) + jnp.sum(l1 * wl)

    got, want = jax.grad(ours)(args), jax.grad(theirs)(args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5 * np.abs(w).max())


def test_transforms_agree():
    x, gate, up, down, _ = inputs((4, 6), bias=False)

    def loss(x, gate, up, down):
        o = gated_ffn(x, gate, up, down)
        return jnp.sum(o.y**2) + jnp.sum(o.l1)

    grad = jax.grad(loss, argnums=(0, 1, 2, 3))
    want = grad(x, gate, up, down)
    for name, f in {
        "jit": jax.jit(grad),
        "remat": jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2, 3)),
    }.items():
        for g, w in zip(f(x, gate, up, down), want, strict=True):
            np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5 * np.abs(w).max(), err_msg=name)
    experts = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), (x, gate, up, down))
    batched = jax.vmap(grad)(*experts)
    for g, w in zip(batched, want, strict=True):
        np.testing.assert_allclose(g[0], w, rtol=2e-5, atol=2e-5 * np.abs(w).max())


def test_bf16_error_is_rounding():
    x, gate, up, down, _ = inputs((64,), d=64, f=128, bias=False)
    y32, _, _ = formula(x, gate, up, down, None, "relu")
    half = [a.astype(jnp.bfloat16) for a in (x, gate, up, down)]
    out = gated_ffn(*half)
    assert out.y.dtype == jnp.bfloat16
    error = np.linalg.norm(out.y.astype(jnp.float32) - y32) / np.linalg.norm(y32)
    assert 1e-4 < error < 1e-2


def test_nan_and_inf_reach_the_output():
    x, gate, up, down, _ = inputs((3,), bias=False)
    out = gated_ffn(x.at[1, 2].set(jnp.nan), gate, up, down)
    assert np.isnan(out.y[1]).all() and np.isfinite(out.y[0]).all()
    assert np.isnan(out.l1[1])
    out = gated_ffn(x.at[1, 2].set(jnp.inf), gate, up, down)
    assert not np.isfinite(out.y[1]).any()


def test_empty_and_full_rows():
    x, gate, up, down, _ = inputs((3,), bias=False)
    f = up.shape[0]
    out = gated_ffn(x, gate, up, down, gate_bias=jnp.full((f,), -1e3))
    assert not out.nnz.any() and not out.y.any() and not out.l1.any()
    assert (gated_ffn(x, gate, up, down, gate_bias=jnp.full((f,), 1e3)).nnz == f).all()


def test_no_token_and_one_vector():
    x, gate, up, down, _ = inputs((2,), bias=False)
    assert gated_ffn(x[:0], gate, up, down).y.shape == (0, x.shape[1])
    one = gated_ffn(x[0], gate, up, down)
    np.testing.assert_allclose(one.y, gated_ffn(x, gate, up, down).y[0], rtol=2e-5, atol=1e-5)


def test_output_unpacks_as_three():
    x, gate, up, down, _ = inputs(bias=False)
    y, l1, nnz = gated_ffn(x, gate, up, down)
    assert y.shape == x.shape and l1.shape == nnz.shape == x.shape[:-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(activation="tanh"), "activation must be one of"),
        (dict(implementation="cuda"), "implementation must be one of"),
        (dict(up=np.zeros((16, 33), np.float32)), r"pass up\.T"),
        (dict(down=np.zeros((32, 16), np.float32)), "down must have shape"),
        (dict(gate=np.zeros((33, 16), np.float16)), "gate must have x's dtype float32"),
        (dict(gate_bias=np.zeros((16,), np.float32)), "gate_bias must have shape"),
        (dict(x=np.zeros((3, 16), np.int32)), "floating-point"),
    ],
)
def test_wrong_arguments(change, message):
    x, gate, up, down, _ = inputs(bias=False)
    kwargs = {"x": x, "gate": gate, "up": up, "down": down} | change
    with pytest.raises(ValueError, match=message):
        gated_ffn(**kwargs)


def test_dispatch_reasons():
    assert dispatch.select("op", None, {"triton": "no GPU", "xla": None}) == "xla"
    with pytest.raises(UnsupportedError, match="no GPU"):
        dispatch.select("op", "triton", {"triton": "no GPU", "xla": None})
    with pytest.raises(UnsupportedError, match="no engine"):
        dispatch.select("op", None, {"triton": "no GPU"})
    assert not dispatch.interpreting()
    with dispatch.interpret():
        assert dispatch.interpreting()


@pytest.mark.parametrize(("activation", "most"), [("relu", 9000), ("silu", 13000)])
def test_h_is_not_kept_for_the_backward_pass(activation, most):
    """Bytes that one more layer keeps per token, in the compiled program of a small net.

    XLA, left alone, finds h of the forward pass in the backward pass again and keeps it: 4,096
    bytes more here, so 13,000 and 16,900 (some are weight gradients, and what a CPU widens).
    """
    tokens, d, f = 512, 64, 1024

    def loss(layers, x):
        penalty = 0.0
        for gate, up, down in layers:
            out = gated_ffn(x, gate, up, down, activation=activation, implementation="xla")
            x, penalty = x + out.y, penalty + 1e-3 * jnp.sum(out.l1)
        return jnp.sum(x.astype(jnp.float32) ** 2) + penalty

    def temporary(layers):
        weight = jax.ShapeDtypeStruct((f, d), jnp.bfloat16)
        x = jax.ShapeDtypeStruct((tokens, d), jnp.bfloat16)
        program = jax.jit(jax.grad(loss)).lower([(weight,) * 3] * layers, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert (temporary(8) - temporary(2)) / 6 / tokens < most
