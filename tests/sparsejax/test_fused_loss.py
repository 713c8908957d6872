"""The one-walk loss against log-softmax, plain and on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import MeshConfig, make_mesh
from sparsejax.fused_loss import pays, weighted_cross_entropy
from sparsejax.sharding import NamedSharding, P, batch_sharding

B, T, D, V = 8, 12, 16, 96


@pytest.fixture(scope="module")
def case():
    k = jax.random.split(jax.random.key(0), 5)
    hidden = jax.random.normal(k[0], (B, T, D))
    weight = jax.random.normal(k[1], (V, D))
    targets = jax.random.randint(k[2], (B, T), 0, V)
    kept = jax.random.uniform(k[4], (B, T)) > 0.3
    return hidden, weight, targets, jnp.where(kept, jax.random.uniform(k[3], (B, T)), 0.0)


def reference(case):
    """Loss and gradients in float64."""
    h, w, targets, weights = (np.asarray(a, np.float64) for a in case)
    logits = h @ w.T
    logits -= logits.max(-1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    one_hot = np.eye(V)[targets.astype(int)]
    loss = -(weights * np.log((p * one_hot).sum(-1))).sum()
    dlogits = (p - one_hot) * weights[..., None]
    return loss, dlogits @ w, np.einsum("btv,btd->vd", dlogits, h)


def assert_close(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5 * np.abs(w).max())


@pytest.mark.parametrize("chunk", [1, 10, 40, 96, 5000])
def test_loss_and_gradients(case, chunk):
    h, w, targets, weights = case

    def f(h, w):
        return 3.0 * weighted_cross_entropy(h, w, targets, weights, chunk=chunk)

    loss, grads = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(h, w)
    assert_close((loss / 3, *(g / 3 for g in grads)), reference(case))
    assert_close((jax.jit(f)(h, w) / 3,), reference(case)[:1])


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 2, 4), (1, 1, 8)])
def test_on_meshes(case, sizes):
    h, w, targets, weights = case
    mesh = make_mesh(MeshConfig(*sizes))
    with jax.set_mesh(mesh):
        h = jax.device_put(h, batch_sharding(mesh))
        w = jax.device_put(w, NamedSharding(mesh, P("tensor", None)))
        f = jax.jit(
            jax.value_and_grad(
                lambda h, w: weighted_cross_entropy(h, w, targets, weights, chunk=20),
                argnums=(0, 1),
            )
        )
        loss, grads = f(h, w)
        assert_close((loss, *grads), reference(case))
        compiled = f.lower(h, w).compile().as_text()
    # The vocabulary stays split: no device ever holds the logits of all ids or the whole head.
    if sizes[2] > 1:
        assert f"f32[{V},{D}]" not in compiled


def test_targets_outside_the_vocabulary(case):
    h, w, targets, weights = case
    weights = weights.at[0, 0].set(1.0).at[1, 1].set(0.0)
    bad = targets.at[0, 0].set(V)
    assert np.isnan(weighted_cross_entropy(h, w, bad, weights))
    # 64 bits from NumPy, which JAX would narrow to the id itself.
    wide = np.asarray(targets, np.int64) + np.where(np.asarray(bad) == V, 2**32, 0)
    assert np.isnan(weighted_cross_entropy(h, w, wide, weights))  # pyright: ignore
    ignored = targets.at[1, 1].set(-1)
    np.testing.assert_allclose(
        weighted_cross_entropy(h, w, ignored, weights),
        weighted_cross_entropy(h, w, targets, weights),
        rtol=1e-6,
    )


def test_nothing_as_large_as_tokens_times_vocabulary(case):
    h = jnp.ones((2, 64, 32))
    w = jnp.ones((8192, 32))
    targets, weights = jnp.zeros((2, 64), jnp.int32), jnp.ones((2, 64))
    f = jax.jit(
        jax.value_and_grad(
            lambda h, w: weighted_cross_entropy(h, w, targets, weights), argnums=(0, 1)
        )
    )
    compiled = f.lower(h, w).compile()
    logits_bytes = 4 * 2 * 64 * 8192
    assert compiled.memory_analysis().temp_size_in_bytes < logits_bytes
    for shape in ("f32[2,64,8192]", "f32[128,8192]", "f32[8192,128]", "f32[64,2,8192]"):
        assert shape not in compiled.as_text()


def test_when_it_pays():
    assert pays(1, 8, 272)  # one chunk: nothing is read twice
    assert pays(32, 2048, 49152)
    assert not pays(1, 2048, 49152)
    assert not pays(32, 2039, 49152)  # a prime length: chunks of one position


def test_wrong_arguments(case):
    h, w, targets, weights = case
    with pytest.raises(ValueError, match="weights must have shape"):
        weighted_cross_entropy(h, w, targets, weights[:1])
    with pytest.raises(ValueError, match="share dtype"):
        weighted_cross_entropy(h, w.astype(jnp.bfloat16), targets, weights)
    with pytest.raises(ValueError, match="chunk must be positive"):
        weighted_cross_entropy(h, w, targets, weights, chunk=0)
