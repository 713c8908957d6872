import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from sparsejax import sampling as module
from sparsejax.sampling import NOT_FINITE, make_sampling

V = 40
sample, kept_tokens = jax.jit(module.sample), jax.jit(module.kept_tokens)


def reference_distribution(logits, *, temperature, top_p=1.0, top_k=None):
    """Probabilities (V,) of one row in float64, candidates in order of logit, then of id."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or len(logits)]
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    probabilities = weights / weights.sum()
    count = next(n for n in range(1, len(order) + 1) if _reaches(probabilities[:n], top_p, order))
    out = np.zeros(len(logits))
    out[order[:count]] = probabilities[:count] / probabilities[:count].sum()
    return out


def _reaches(kept, top_p, order):
    return len(kept) == len(order) or kept.sum() >= top_p


def random_logits(rows, seed=0):
    return np.random.default_rng(seed).normal(scale=2.5, size=(rows, V)).astype(np.float32)


def draws(logits, sampling, count, seed=0):
    keys = jax.random.split(jax.random.key(seed), count)
    rows = jnp.broadcast_to(jnp.asarray(logits), (count, len(logits)))
    return np.asarray(sample(rows, keys, sampling))


def test_greedy_is_the_first_largest_logit():
    logits = np.round(random_logits(50))  # many ties
    ties = (logits == logits.max(-1, keepdims=True)).sum(-1)
    assert (ties > 1).any()
    tokens = sample(jnp.asarray(logits), None, make_sampling(V))
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.5, "top_p": 0.5},
        {"temperature": 3.0, "top_p": 0.97, "top_k": 30},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 1.0},
    ],
    ids=str,
)
def test_kept_tokens_equal_the_reference(settings, ties):
    logits = random_logits(64)
    logits = np.round(logits) if ties else logits
    kept = kept_tokens(jnp.asarray(logits), make_sampling(V, **settings))
    expected = np.stack([reference_distribution(row, **settings) > 0 for row in logits])
    np.testing.assert_array_equal(kept, expected)
    assert expected.sum(-1).min() >= 1


@pytest.mark.parametrize(("top_p", "count"), [(0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3)])
def test_the_smallest_set_that_reaches_top_p(top_p, count):
    # Four equal logits are exactly a quarter each; lower ids come first.
    kept = kept_tokens(jnp.zeros((1, 4)), make_sampling(4, temperature=1.0, top_p=top_p))
    np.testing.assert_array_equal(kept[0], np.arange(4) < count)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 9},
        {"temperature": 2.0, "top_p": 0.8, "top_k": 20},
    ],
    ids=str,
)
def test_frequencies_follow_the_reference(settings):
    logits, n = random_logits(1)[0], 20_000
    found = np.bincount(draws(logits, make_sampling(V, **settings), n), minlength=V)

    def p_value(expected):
        """Chi-square test over cells of at least five, the others in one cell."""
        if found[expected == 0].any():
            return 0.0
        large = n * expected >= 5
        want, got = (np.append(x[large], x[~large].sum()) for x in (n * expected, found))
        return scipy.stats.chisquare(got[want > 0], want[want > 0]).pvalue

    # The seed is fixed. A distribution that is off by little is seen.
    hotter = settings | {"temperature": settings["temperature"] * 1.2}
    assert p_value(reference_distribution(logits, **settings)) > 1e-3
    assert p_value(reference_distribution(logits, **hotter)) < 1e-6


def test_a_row_depends_on_its_own_logits_and_key_only():
    logits, keys = jnp.asarray(random_logits(6)), jax.random.split(jax.random.key(3), 6)
    sampling = make_sampling(V, temperature=1.2, top_p=0.95)
    together = sample(logits, keys, sampling)
    for i in range(6):
        assert sample(logits[i : i + 1], keys[i : i + 1], sampling)[0] == together[i]
    assert len(set(np.asarray(together).tolist())) > 1


def test_filters_change_only_draws_of_tokens_they_remove():
    logits = random_logits(1)[0]
    free = draws(logits, make_sampling(V, temperature=1.5), 500)
    sampling = make_sampling(V, temperature=1.5, top_p=0.8)
    filtered = draws(logits, sampling, 500)
    kept = np.asarray(kept_tokens(jnp.asarray(logits)[None], sampling))[0]
    stays = kept[free]
    assert 0 < stays.sum() < 500
    np.testing.assert_array_equal(filtered[stays], free[stays])
    assert kept[filtered].all()


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 100.0}, {"temperature": 100.0, "top_p": 0.99}], ids=str
)
def test_padding_ids_are_never_drawn(settings):
    logits = np.zeros(V, np.float32)
    logits[30:] = 1e9  # what an untrained padding row may say
    sampling = make_sampling(V, num_tokens=30, **settings)
    tokens = draws(logits, sampling, 2000)
    assert tokens.max() < 30
    assert len(set(tokens.tolist())) == (30 if settings else 1)
    if settings:
        assert not kept_tokens(jnp.asarray(logits)[None], sampling)[0, 30:].any()


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = random_logits(20)
    for top_p in (1.0, 0.9):
        sampling = make_sampling(V, temperature=temperature, top_p=top_p)
        keys = jax.random.split(jax.random.key(0), 20)
        tokens = sample(jnp.asarray(logits), keys, sampling)
        np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_rows_that_are_not_finite_are_marked(settings):
    logits = random_logits(5)
    logits[1, 3], logits[2, 7], logits[3] = np.nan, np.inf, -np.inf
    logits[4, 3] = -np.inf  # one impossible token is no fault
    keys = jax.random.split(jax.random.key(0), 5)
    tokens = np.asarray(sample(jnp.asarray(logits), keys, make_sampling(V, **settings)))
    np.testing.assert_array_equal(tokens == NOT_FINITE, [False, True, True, True, False])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be 0 .* got -0\.1"),
        ({"temperature": float("nan")}, "temperature must be 0 .* got nan"),
        ({"temperature": float("inf")}, "temperature must be 0 .* got inf"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0\.0"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\], got 1\.01"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"num_tokens": 41}, r"num_tokens must be in \[1, vocab_size = 40\], got 41"),
        ({"num_tokens": 0}, r"num_tokens must be in \[1, vocab_size = 40\], got 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_sampling(V, **settings)
