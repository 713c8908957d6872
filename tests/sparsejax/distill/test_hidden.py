"""Cosine distances of hidden states against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.distill.hidden import cosine_distance, hidden_cosines
from sparsejax.model import ModelOutput

RNG = np.random.default_rng(0)


def output(*states):
    stats: Any = None  # not looked at
    return ModelOutput(hidden=states[-1], stats=stats, cache=None, hidden_states=states)


def stream(n):
    return [jnp.asarray(RNG.normal(size=(2, 5, 8)), jnp.float32) for _ in range(n)]


def distance64(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return 1 - (x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1))


def test_cosine_distance():
    x, y = stream(2)
    np.testing.assert_allclose(cosine_distance(x, y), distance64(x, y), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(cosine_distance(x, 3 * x), 0, atol=1e-6)
    np.testing.assert_allclose(cosine_distance(x, -x), 2, atol=1e-6)
    half = cosine_distance(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))
    assert half.dtype == jnp.float32


def test_cosine_distance_of_zero_is_one_with_a_finite_gradient():
    x, y = stream(2)
    value, grad = jax.value_and_grad(lambda z: cosine_distance(z, y).sum())(jnp.zeros_like(x))
    assert value == 10
    assert np.isfinite(grad).all()


def test_pairs_follow_the_map_and_the_weights():
    student, teacher = stream(4), stream(6)
    weights = np.array([[0.1, 0.0, 0.3, 0.2, 0.0], [0.1, 0.1, 0.0, 0.1, 0.1]], np.float32)
    student[1] = student[1].at[0, 1].set(jnp.nan)  # where the weight is zero
    layer_map = (2, None, 4)
    got = hidden_cosines(output(*student), output(*teacher), layer_map, jnp.asarray(weights))
    kept = np.where(weights == 0, 0, 1)
    want = []
    for s, t in ((1, 3), (3, 5)):
        distance = np.nan_to_num(distance64(student[s], teacher[t]))
        want.append((kept * weights.astype(np.float64) * distance).sum())
    np.testing.assert_allclose(got, want, rtol=2e-5)


def test_gradients_reach_the_student_only():
    student, teacher = stream(2), stream(2)
    weights = jnp.full((2, 5), 0.1)

    def f(s, t):
        return hidden_cosines(output(*s), output(*t), (0,), weights).sum()

    to_student, to_teacher = jax.grad(f, argnums=(0, 1))(student, teacher)
    assert not any(np.any(g) for g in to_teacher)
    h, y = (np.asarray(x[1], np.float64) for x in (student, teacher))
    length, other = (np.linalg.norm(x, axis=-1, keepdims=True) for x in (h, y))
    cosine = (h * y).sum(-1, keepdims=True) / (length * other)
    want = -0.1 * (y / other - cosine * h / length) / length
    np.testing.assert_allclose(to_student[1], want, rtol=2e-5, atol=1e-6)
