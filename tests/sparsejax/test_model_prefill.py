"""Prefill from position 0: the same as with its positions given, without a scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import Options, forward
from sparsejax.attention import init_cache
from tests.sparsejax.test_model import FULL, NO_ATTENTION, ODD, TOKENS, random_params

PROMPT = ODD.replace(layers=(FULL, NO_ATTENTION))


def prefill(given, slots, fresh, dtype=None):
    """The program of 6 tokens in each of 2 rows and its arguments; positions as arguments or None.

    The cache is not zero, so that a slot that is wrongly written, or not, shows.
    """
    at = jnp.tile(jnp.arange(6, dtype=jnp.int32), (2, 1)) if given else None
    cache = jax.tree.map(jnp.ones_like, init_cache(PROMPT, 2, slots, dtype))

    @jax.jit
    def run(params, tokens, positions, cache):
        options = Options(fresh_cache=fresh)
        out = forward(PROMPT, params, tokens, positions=positions, cache=cache, options=options)
        return out.hidden, out.cache

    return run, (random_params(PROMPT), jnp.asarray(TOKENS[:, :6]), at, cache)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("slots", [6, 9])
def test_a_prefill_from_position_0_is_the_one_with_its_positions_given(slots, dtype, fresh):
    (run, arguments), (run_given, given) = (prefill(g, slots, fresh, dtype) for g in (False, True))
    (hidden, cache), (hidden_given, cache_given) = run(*arguments), run_given(*given)
    np.testing.assert_array_equal(hidden, hidden_given)
    leaves = jax.tree.leaves(cache), jax.tree.leaves(cache_given)
    for got, want in zip(*leaves, strict=True):
        assert got.dtype == jnp.dtype(dtype) and got.shape == (2, 2, slots, 6)
        np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
        assert (got[:, :, 6:] == 1).all() and not (got[:, :, :6] == 1).all(-1).any()


def test_a_prefill_from_position_0_scatters_nothing_and_copies_no_more_than_it_must():
    def lowered(*setting):
        run, arguments = prefill(*setting)
        return run.lower(*arguments)

    scatters = '"stablehlo.scatter"('
    assert lowered(True, 9, True).as_text().count(scatters) == 2  # what is looked for
    for slots, updates in ((9, True), (6, False)):
        program = lowered(False, slots, True)
        assert "stablehlo.scatter" not in program.as_text()
        text = str(program.compile().as_text())
        assert " scatter(" not in text  # the operation: names of functions stand there, too
        # The cache's old keys and values are gone from the program where all slots are written.
        assert ("dynamic-update-slice" in text) == updates


def test_a_prefill_of_an_empty_cache_does_not_attend_to_it():
    run, (*arguments, cache) = prefill(False, 9, True)
    traced = [str(jax.make_jaxpr(run)(*arguments, c)) for c in (cache, None)]
    assert traced[0].count("dot_general") == traced[1].count("dot_general") > 2


def test_more_tokens_than_slots_are_refused():
    run, arguments = prefill(False, 5, True)
    with pytest.raises(ValueError, match=r"cache: 6 tokens from position 0 on need .* 6 or more"):
        run.lower(*arguments)
