"""Attention against loops over heads and positions in float64; the cache against no cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import attention
from sparsejax.attention import LayerCache, cached_attention, init_cache, write_cache
from sparsejax.config import AttentionConfig, FFNConfig, LayerConfig, ModelConfig

causal_attention = jax.jit(attention.causal_attention)


def loops(q, k, v, segments=None):
    """One query, one head at a time; query head h reads key/value head h // (H / G)."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = np.zeros_like(q)
    share = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = [s for s in range(t + 1) if segments is None or segments[b][s] == segments[b][t]]
        scores = np.array([q[b, t, h] @ k[b, s, h // share] for s in seen]) / q.shape[3] ** 0.5
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, t, h] = sum(w * v[b, s, h // share] for w, s in zip(weights, seen, strict=True))
    return out


def inputs(b=2, t=7, h=6, g=2, k=8, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(b, t, h, k), (b, t, g, k), (b, t, g, k)]
    return [jnp.asarray(2 * rng.normal(size=s), jnp.float32) for s in shapes]


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize(("h", "g"), [(6, 2), (3, 3)])
def test_grouped_heads(h, g):
    q, k, v = inputs(h=h, g=g)
    close(causal_attention(q, k, v, None), loops(q, k, v))


SEGMENTS = [[0, 0, 0, 1, 1, 2, 2], [5, 3, 3, 3, 3, 3, 5]]


def test_documents_do_not_see_each_other():
    q, k, v = inputs()
    got = causal_attention(q, k, v, jnp.array(SEGMENTS))
    close(got, loops(q, k, v, SEGMENTS))
    assert np.abs(got - causal_attention(q, k, v, None)).max() > 0.1


def test_gradients_reach_only_what_is_seen():
    q, k, v = inputs()

    def fifth_of_first_row(k, v):
        return jnp.sum(causal_attention(q, k, v, jnp.array(SEGMENTS))[0, 4])

    for grad in jax.jit(jax.grad(fifth_of_first_row, argnums=(0, 1)))(k, v):
        reached = np.abs(grad).max(axis=(2, 3)) > 1e-6
        assert reached.tolist() == [[False, False, False, True, True, False, False], [False] * 7]


def test_half_precision_forward_and_backward():
    q, k, v = inputs(t=16, k=16)
    half = [a.astype(jnp.bfloat16) for a in (q, k, v)]
    weight = jax.random.normal(jax.random.key(9), q.shape)

    def loss(q, k, v):
        return jnp.sum(causal_attention(q, k, v, None).astype(jnp.float32) * weight)

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    got, grads = grad(*half)
    _, wanted = grad(*(a.astype(jnp.float32) for a in half))
    assert got.dtype == jnp.float32
    assert causal_attention(*half, None).dtype == jnp.bfloat16
    for g, w in zip(grads, wanted, strict=True):
        assert g.dtype == jnp.bfloat16
        error = np.linalg.norm(g.astype(jnp.float32) - w) / np.linalg.norm(w)
        assert error < 2.0**-8


def test_cached_equals_uncached_at_unequal_positions():
    """Row 0 is a prompt of 4, row 1 one of 2 (padded to 4); then both go on, token by token."""
    q, k, v = inputs(t=8)
    empty = jnp.zeros((2, 2, 9, 8))
    step = jax.jit(cached_attention)
    positions = jnp.tile(jnp.arange(4, dtype=jnp.int32), (2, 1))
    out, cache = step(q[:, :4], k[:, :4], v[:, :4], positions, LayerCache(empty, empty))
    want = loops(q, k, v)
    close(out[0], want[0, :4])
    close(out[1, :2], want[1, :2])
    for n in range(4):
        at = jnp.array([[4 + n], [2 + n]], jnp.int32)
        rows = [jnp.take_along_axis(a, at[:, :, None, None], axis=1) for a in (q, k, v)]
        out, cache = step(*rows, at, cache)
        close(out[0, 0], want[0, 4 + n])
        close(out[1, 0], want[1, 2 + n])
    np.testing.assert_array_equal(cache.keys[0, :, :8], k[0].swapaxes(0, 1))
    np.testing.assert_array_equal(cache.values[1, :, :6], v[1, :6].swapaxes(0, 1))
    assert not cache.keys[0, :, 8].any()


def test_several_tokens_at_once_after_a_prompt():
    q, k, v = inputs(t=7)
    empty = jnp.zeros((2, 2, 7, 8))
    cache = LayerCache(empty, empty)
    outs = []
    for start, stop in ((0, 3), (3, 7)):
        at = jnp.tile(jnp.arange(start, stop, dtype=jnp.int32), (2, 1))
        out, cache = jax.jit(cached_attention)(
            q[:, start:stop], k[:, start:stop], v[:, start:stop], at, cache
        )
        outs.append(out)
    close(np.concatenate(outs, axis=1), loops(q, k, v))


def test_a_key_beyond_the_last_slot_is_lost_and_nothing_else_changes():
    """The documented limit: the caller checks positions; no other slot is overwritten."""
    q, k, v = inputs(t=1)
    full = jnp.ones((2, 2, 3, 8))
    _, cache = jax.jit(cached_attention)(q, k, v, jnp.array([[3], [2]]), LayerCache(full, full))
    np.testing.assert_array_equal(cache.keys[0], full[0])
    np.testing.assert_array_equal(cache.keys[1], full[1].at[:, 2].set(k[1, 0]))
    assert "lost" in (cached_attention.__doc__ or "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_without_positions_tokens_go_into_the_first_slots(dtype):
    _, k, v = inputs(t=5)
    full = jnp.ones((2, 2, 7, 8), dtype)
    cache = jax.jit(write_cache)(k, v, None, LayerCache(full, full))
    for got, rows in ((cache.keys, k), (cache.values, v)):
        want = np.ones((2, 2, 7, 8), np.float32)
        want[:, :, :5] = rows.astype(dtype).astype(jnp.float32).swapaxes(1, 2)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(jnp.float32), want)


@pytest.mark.parametrize("shape", [(2, 2, 4, 8), (3, 2, 5, 8), (2, 3, 5, 8), (2, 2, 5, 9)])
def test_a_cache_into_which_the_tokens_do_not_fit_is_refused(shape):
    """A plain copy would fill a corner of a cache that is too large without a sign."""
    _, k, v = inputs(t=5)
    cache = LayerCache(jnp.ones(shape), jnp.ones(shape))
    with pytest.raises(
        ValueError, match=r"= \(2, 2, 5 or more, 8\), got \(.*init_cache\(config, 2, 5"
    ):
        write_cache(k, v, None, cache)


def test_a_cache_of_another_dtype():
    q, k, v = (a.astype(jnp.bfloat16) for a in inputs(t=5))
    empty = jnp.zeros((2, 2, 5, 8), jnp.float32)
    at = jnp.tile(jnp.arange(5, dtype=jnp.int32), (2, 1))
    out, cache = jax.jit(cached_attention)(q, k, v, at, LayerCache(empty, empty))
    assert out.dtype == jnp.bfloat16 and cache.keys.dtype == jnp.float32
    want = loops(q, k, v)
    assert np.linalg.norm(out.astype(jnp.float32) - want) / np.linalg.norm(want) < 2.0**-7


def test_init_cache_holds_attention_layers_only():
    a = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    b = AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=16)
    layers = (
        LayerConfig(attention=a, ffn=None),
        LayerConfig(attention=None, ffn=FFNConfig(d_ff=8)),
        LayerConfig(attention=b, ffn=None),
    )
    config = ModelConfig(vocab_size=8, d_model=8, layers=layers)
    cache = init_cache(config, 3, 11)
    assert {name: c.keys.shape for name, c in cache.items()} == {
        "layer_0": (3, 2, 11, 8),
        "layer_2": (3, 1, 11, 16),
    }
    assert all(c.dtype == jnp.bfloat16 and not c.any() for c in jax.tree.leaves(cache))
    assert init_cache(config, 3, 11, jnp.float32)["layer_0"].values.dtype == jnp.float32


@pytest.mark.parametrize(
    ("dtype", "t", "k", "masked", "able"),
    [
        (jnp.bfloat16, 2048, 64, False, True),
        (jnp.float16, 7, 128, False, True),
        (jnp.bfloat16, 2048, 64, True, True),
        (jnp.bfloat16, 7, 64, True, False),
        (jnp.bfloat16, 2048, 20, False, False),
        (jnp.bfloat16, 2048, 256, False, False),
        (jnp.float32, 2048, 64, False, False),
    ],
)
def test_cudnn_is_asked_only_for_what_it_can_run(monkeypatch, dtype, t, k, masked, able):
    q = jax.ShapeDtypeStruct((1, t, 2, k), dtype)
    assert not attention._cudnn(q, masked=masked)  # pyright: ignore
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert attention._cudnn(q, masked=masked) == able  # pyright: ignore
