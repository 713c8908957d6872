"""KL on logits against float64, its gradients against the naive form, plain and on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import MeshConfig, make_mesh
from sparsejax.distill.logits import distillation_loss
from sparsejax.sharding import NamedSharding, P, batch_sharding

B, T, D, D2, V = 8, 12, 16, 24, 96


@pytest.fixture(scope="module")
def case():
    """hidden, head, teacher_hidden, teacher_head, targets, weights."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s) for s in ((B, T, D), (V, D), (B, T, D2), (V, D2))]
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    weights = np.where(rng.uniform(size=(B, T)) > 0.3, rng.uniform(size=(B, T)), 0.0)
    return (*(jnp.asarray(a, jnp.float32) for a in arrays), targets, weights.astype(np.float32))


def log_softmax(h, w):
    logits = h @ w.T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def reference(case, a, b):
    """Loss, KL, CE and the student's gradients in float64."""
    h, w, th, tw, targets, weights = (np.asarray(x, np.float64) for x in case)
    log_q, log_p = log_softmax(h, w), log_softmax(th, tw)
    one_hot = np.eye(V)[targets.astype(int)]
    kl = (weights * (np.exp(log_p) * (log_p - log_q)).sum(-1)).sum()
    ce = -(weights * (log_q * one_hot).sum(-1)).sum()
    dlogits = a * (np.exp(log_q) - np.exp(log_p)) + b * (np.exp(log_q) - one_hot)
    dlogits *= weights[..., None]
    return a * kl + b * ce, kl, ce, dlogits @ w, np.einsum("btv,btd->vd", dlogits, h)


def assert_close(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5 * np.abs(w).max())


def run(case, a, b, chunk, scale=1.0):
    def f(h, w):
        loss, kl, ce = distillation_loss(h, w, *case[2:], kl_weight=a, lm_weight=b, chunk=chunk)
        # The sums carry no gradient: only the loss's may arrive.
        return scale * loss + 7.0 * kl + 5.0 * ce, (loss, kl, ce)

    grads, sums = jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True))(*case[:2])
    return *sums, *(g / scale for g in grads)


@pytest.mark.parametrize(("a", "b", "chunk"), [(1, 0, 10), (1, 0, 5000), (0.7, 0.4, 1), (0, 1, 40)])
def test_loss_and_gradients_equal_float64(case, a, b, chunk):
    assert_close(run(case, a, b, chunk, scale=3.0), reference(case, a, b))
    plain = jax.jit(lambda *x: distillation_loss(*x, kl_weight=a, lm_weight=b, chunk=chunk))(*case)
    assert_close(plain, reference(case, a, b)[:3])


def test_gradients_equal_those_of_the_naive_form(case):
    *_, targets, weights = case

    def naive(h, w):
        log_q = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", h, w))
        log_p = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", case[2], case[3]))
        return jnp.sum(weights * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))

    assert_close(run(case, 1.0, 0.0, 20)[3:], jax.grad(naive, argnums=(0, 1))(*case[:2]))


def test_the_teacher_gets_no_gradient(case):
    f = jax.grad(lambda th, tw: distillation_loss(*case[:2], th, tw, *case[4:])[0], argnums=(0, 1))
    assert not any(np.any(g) for g in f(*case[2:4]))


def test_a_student_that_is_the_teacher_is_at_zero(case):
    same = (case[2], case[3], case[2], case[3], *case[4:])
    loss, kl, ce, dh, dw = run(same, 1.0, 0.0, 30)
    assert abs(loss) < 1e-5 and abs(kl) < 1e-5 and ce > 1  # weights add up to 35
    assert np.abs(dh).max() < 1e-5 and np.abs(dw).max() < 1e-5  # of the order of 1 elsewhere


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 1, 8)])
def test_on_meshes(case, sizes):
    mesh = make_mesh(MeshConfig(*sizes))
    rows, vocab = batch_sharding(mesh), NamedSharding(mesh, P("tensor", None))
    places = (rows, vocab, rows, vocab, rows, rows)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, s) for x, s in zip(case, places, strict=True)]

        def f(h, w, *rest):
            loss, *sums = distillation_loss(h, w, *rest, kl_weight=0.7, lm_weight=0.4, chunk=20)
            return loss, (loss, *sums)

        compiled = jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True)).lower(*placed).compile()
        grads, sums = compiled(*placed)
    assert_close((*sums, *grads), reference(case, 0.7, 0.4))
    # The vocabulary stays split: no device holds the whole of either head.
    if sizes[2] > 1:
        assert f"f32[{V},{D}]" not in compiled.as_text()
        assert f"f32[{V},{D2}]" not in compiled.as_text()


def temp_bytes(vocab, **changes):
    shapes = [(4, 64, 32), (vocab, 32), (4, 64, 32), (vocab, 32)]
    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    arrays += [jax.ShapeDtypeStruct((4, 64), d) for d in (jnp.int32, jnp.float32)]
    f = jax.grad(lambda *x: distillation_loss(*x, **changes)[0], argnums=(0, 1))
    return jax.jit(f).lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_hold_the_logits_of_all_tokens():
    small, large = (temp_bytes(v) for v in (8192, 32768))
    heads = 4 * 32 * (32768 - 8192)  # the float32 gradient of the head, kept once or twice
    assert large - small < 3 * heads
    assert large < 4 * 4 * 64 * 32768  # less than one model's logits
    # In one chunk both models' logits exist at once, and the same measure shows it.
    assert temp_bytes(32768, chunk=32768) > 2 * 4 * 4 * 64 * 32768


def test_nan_in_the_teacher_is_not_hidden(case):
    broken = case[2].at[0, 0].set(jnp.nan)
    weights = jnp.asarray(case[5]).at[0, 0].set(1.0)
    assert np.isnan(distillation_loss(*case[:2], broken, *case[3:5], weights)[1])
    unused = weights.at[0, 0].set(0.0)
    assert np.isfinite(distillation_loss(*case[:2], broken, *case[3:5], unused)[1])


def test_certainty_of_the_teacher_is_no_nan(case):
    certain = 1e4 * case[2]  # all but one probability are exactly zero
    loss, kl, ce, *grads = run((*case[:2], certain, *case[3:]), 1.0, 0.0, 50)
    assert all(np.isfinite(x).all() for x in (loss, kl, ce, *grads))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: jnp.ones((V + 1, D2))}, f"one vocabulary, got heads of {V} and {V + 1} rows"),
        ({3: jnp.ones((V, D))}, r"\(teacher\): hidden .* must share dtype and last dimension"),
        ({5: jnp.ones((1, T))}, "weights must have shape"),
        ({2: jnp.ones((B, T + 1, D2))}, r"\(teacher\): targets must have shape"),
    ],
)
def test_wrong_arguments(case, change, message):
    arguments = [change.get(i, x) for i, x in enumerate(case)]
    with pytest.raises(ValueError, match=message):
        distillation_loss(*arguments)
