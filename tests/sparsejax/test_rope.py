"""Rotary embedding against complex numbers in float64, from the published definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.config import RopeConfig
from sparsejax.rope import inverse_frequencies, rotate

ROPES = {
    "plain": RopeConfig(theta=1e4),
    "linear": RopeConfig(theta=1e5, scaling="linear", factor=4.0),
    "llama3": RopeConfig(theta=5e5, scaling="llama3", factor=8.0),
    "llama3 other bands": RopeConfig(
        theta=1e5,
        scaling="llama3",
        factor=32.0,
        low_freq_factor=2.0,
        high_freq_factor=5.0,
        original_context=512,
    ),
}


def published_frequencies(head_dim, rope):
    """One frequency at a time, with the branches of the published Llama 3.1 code."""
    out = []
    for i in range(head_dim // 2):
        freq = 1.0 / rope.theta ** (2 * i / head_dim)
        if rope.scaling == "linear":
            freq /= rope.factor
        elif rope.scaling == "llama3":
            wavelength = 2 * np.pi / freq
            if wavelength > rope.original_context / rope.low_freq_factor:
                freq /= rope.factor
            elif wavelength >= rope.original_context / rope.high_freq_factor:
                smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                freq = (1 - smooth) * freq / rope.factor + smooth * freq
        out.append(freq)
    return np.array(out)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("head_dim", [2, 64, 128])
def test_frequencies(rope, head_dim):
    got = inverse_frequencies(head_dim, rope)
    assert got.dtype == np.float32 and got.shape == (head_dim // 2,)
    np.testing.assert_allclose(got, published_frequencies(head_dim, rope), rtol=1e-6)


def test_llama3_has_all_three_bands():
    plain = RopeConfig(theta=5e5)
    ratio = inverse_frequencies(128, plain) / inverse_frequencies(128, ROPES["llama3"])
    kept, scaled = np.isclose(ratio, 1.0), np.isclose(ratio, 8.0)
    between = ~kept & ~scaled
    assert kept.sum() > 20 and scaled.sum() > 20 and between.sum() > 2
    # Fast ones first, slow ones last, a monotonic blend between.
    assert kept[0] and scaled[-1] and (np.diff(ratio) > -1e-5).all()


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rotation_at_near_and_far_positions(rope):
    k, positions = 64, np.array([[0, 1000, 8192], [1, 2, 100_000]], np.int32)
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 3, 5, k)))
    got = rotate(jnp.asarray(x), jnp.asarray(positions), rope)
    freq = published_frequencies(k, rope)
    angle = positions[..., None].astype(np.float64) * freq
    # The pair (x_i, x_{i + K/2}) is one complex number turned by the angle.
    turned = (x[..., : k // 2] + 1j * x[..., k // 2 :]) * np.exp(1j * angle)[:, :, None]
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    # A float32 angle is exact to half a unit in its last place twice: frequency and product.
    allowed = (angle * 2.0**-23 + 1e-6)[:, :, None] * np.abs(turned)
    assert (np.abs(got - want) <= np.concatenate([allowed, allowed], axis=-1)).all()
    np.testing.assert_array_equal(got[0, 0], x[0, 0])  # position 0 turns nothing


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_products_depend_on_the_distance_only(rope):
    q, key = jax.random.normal(jax.random.key(1), (2, 1, 1, 1, 64))

    def product(i, j):
        at = [jnp.full((1, 1), p, jnp.int32) for p in (i, j)]
        return float(jnp.sum(rotate(q, at[0], rope) * rotate(key, at[1], rope)))

    assert abs(product(7, 3) - product(1004, 1000)) < 2e-3
    assert abs(product(7, 3) - product(3, 7)) > 1e-2  # and on its sign
    assert abs(product(7, 3) - product(8, 3)) > 1e-2


def test_norms_are_kept_and_dtype_too():
    x = jax.random.normal(jax.random.key(2), (2, 9, 3, 16))
    positions = jnp.tile(1000 * jnp.arange(9, dtype=jnp.int32), (2, 1))
    y = rotate(x, positions, ROPES["llama3"])
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=2e-6)
    half = rotate(x.astype(jnp.bfloat16), positions, ROPES["llama3"])
    assert half.dtype == jnp.bfloat16
    # Angles are float32: the error is the rounding of input and output, at any position.
    np.testing.assert_allclose(half.astype(jnp.float32), y, atol=2.0**-7 * np.abs(y).max())
