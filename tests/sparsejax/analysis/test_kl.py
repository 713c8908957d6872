"""The divergence against NumPy in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.analysis import kl_divergence


def np_kl(p, q, weight):
    def log_softmax(hidden):
        z = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
        z = z - z.max(-1, keepdims=True)
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    log_p, log_q = log_softmax(p), log_softmax(q)
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def arrays(scale, apart, seed=0, shape=(2, 7, 12), vocab=50):
    rng = np.random.default_rng(seed)
    p = rng.normal(size=shape).astype(np.float32)
    q = (p + apart * rng.normal(size=shape)).astype(np.float32)
    return jnp.asarray(p), jnp.asarray(q), jnp.asarray(scale * rng.normal(size=(vocab, 12)), "f")


# 1e-3 apart is KL 1e-6, which the plain sum of p log(p / q) would bury; 30 x is p = 0 in places.
@pytest.mark.parametrize(("scale", "apart"), [(0.3, 1.0), (1.0, 1e-3), (30.0, 3.0), (1.0, 10.0)])
@pytest.mark.parametrize("chunk", [1, 16, 50, 2048])
def test_equal_to_numpy(scale, apart, chunk):
    p, q, weight = arrays(scale, apart)
    with jax.default_matmul_precision("highest"):
        got = jax.jit(kl_divergence, static_argnames="chunk")(p, q, weight, chunk=chunk)
    want = np_kl(p, q, weight)
    assert got.dtype == jnp.float32 and got.shape == (2, 7)
    assert (np.asarray(got) >= 0).all()
    np.testing.assert_allclose(got, want, rtol=3e-3 if apart == 1e-3 else 2e-5, atol=1e-12)


def test_equal_states_are_not_apart_and_nan_shows():
    p, _, weight = arrays(1.0, 0.0)
    np.testing.assert_array_equal(kl_divergence(p, p, weight, chunk=20), 0)
    q = p.at[1, 3, 0].set(jnp.nan)
    got = kl_divergence(p, q, weight, chunk=20)
    assert np.isnan(got[1, 3]) and np.isfinite(got).sum() == 13


def test_logits_of_all_tokens_are_never_held():
    p, q, weight = arrays(1.0, 1.0, shape=(2, 64, 12), vocab=4096)
    text = jax.jit(kl_divergence, static_argnames="chunk").lower(p, q, weight, chunk=512)
    shapes = re.findall(r"f32\[([\d,]+)\]", text.compile().as_text())
    largest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    assert largest <= max(2 * 64 * 512, 4096 * 12)


def test_wrong_requests():
    p, q, weight = arrays(1.0, 1.0)
    with pytest.raises(ValueError, match="chunk must be positive, got 0"):
        kl_divergence(p, q, weight, chunk=0)
    with pytest.raises(ValueError, match=re.escape("got [2, 7, 12], [2, 6, 12] and [50, 12]")):
        kl_divergence(p, q[:, 1:], weight)
