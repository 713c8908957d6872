"""From logits to the next token: greedy, temperature, top-k and top-p, on the device.

Candidates are ordered by logit, ties by id (lower first), so every choice is deterministic given
the key. Each token id has its own noise (Gumbel-max), independent of the filters: tightening
`top_p` or `top_k` changes a draw only where the token drawn before is filtered out.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

NOT_FINITE = -2
"""What `sample` returns in place of a token for a row whose largest logit is NaN or infinite."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to choose a token; made by `make_sampling`, which checks the values.

    Temperature and top_p are traced, so that changing them compiles nothing anew.

    Attributes:
      temperature: () float32, or None for greedy.
      top_p: () float32, or None for 1.
      top_k: candidates kept, or None for all.
      num_tokens: ids below it exist; the rest of the logits is padding.
    """

    temperature: Array | np.float32 | None
    top_p: Array | np.float32 | None
    top_k: int | None = dataclasses.field(metadata={"static": True})
    num_tokens: int = dataclasses.field(metadata={"static": True})


def make_sampling(
    vocab_size: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    num_tokens: int | None = None,
) -> Sampling:
    """Checked settings of `sample`.

    Args:
      vocab_size: columns of the logits.
      temperature: logits are divided by it; 0 takes the largest logit (greedy).
      top_p: keep the smallest set of most probable tokens whose probabilities sum to top_p or more.
      top_k: keep the top_k most probable tokens; applied before top_p.
      num_tokens: size of the real vocabulary where the logits have padding columns; None for none.

    Returns:
      Sampling.

    Raises:
      ValueError: a value out of its range.
    """
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature must be 0 (greedy) or a positive finite number, got {temperature}"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}; 1 keeps all tokens")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}; None keeps all tokens")
    num_tokens = vocab_size if num_tokens is None else num_tokens
    if not 0 < num_tokens <= vocab_size:
        raise ValueError(
            f"num_tokens must be in [1, vocab_size = {vocab_size}], got {num_tokens}; it is the "
            "tokenizer's vocabulary, and the model's vocab_size must not be below it"
        )
    # A temperature that a float32 cannot hold would divide by zero; its limit is greedy.
    greedy = temperature < np.finfo(np.float32).tiny
    return Sampling(
        temperature=None if greedy else np.float32(temperature),
        top_p=None if greedy or top_p == 1 else np.float32(top_p),
        top_k=None if greedy or top_k is None or top_k >= num_tokens else top_k,
        num_tokens=num_tokens,
    )


def sample(logits: Array, keys: Array | None, sampling: Sampling) -> Array:
    """argmax over kept tokens of logits / temperature + Gumbel noise, or argmax logits if greedy.

    Args:
      logits: (B, V); columns from `sampling.num_tokens` on are ignored.
      keys: (B,) PRNG keys, one per row: a row's token depends on its own logits and key only.
        None when greedy.
      sampling: from `make_sampling`.

    Returns:
      (B,) int32 ids below `num_tokens`; `NOT_FINITE` where the row's largest logit is not finite.
    """
    logits = logits[:, : sampling.num_tokens].astype(jnp.float32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    if sampling.temperature is None:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        assert keys is not None
        noise = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[1:], jnp.float32))(keys)
        if sampling.top_k is None and sampling.top_p is None:
            token = jnp.argmax(_scaled(logits, sampling) + noise, axis=-1).astype(jnp.int32)
        else:
            ids, scaled, keep = _candidates(logits, sampling)
            noisy = scaled + jnp.take_along_axis(noise, ids, axis=-1)
            best = jnp.argmax(jnp.where(keep, noisy, -jnp.inf), axis=-1, keepdims=True)
            token = jnp.take_along_axis(ids, best, axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(largest[:, 0]), token, jnp.int32(NOT_FINITE))


def kept_tokens(logits: Array, sampling: Sampling) -> Array:
    """Which tokens `sample` may return, (B, V) bool, for a sampling that is not greedy."""
    real = logits[:, : sampling.num_tokens].astype(jnp.float32)
    ids, _, keep = _candidates(real, sampling)
    nothing = jnp.zeros(logits.shape, bool)
    return jnp.put_along_axis(nothing, ids, keep, axis=-1, inplace=False)


def _scaled(logits: Array, sampling: Sampling) -> Array:
    assert sampling.temperature is not None
    # The shift keeps a tiny temperature from overflowing.
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature


def _candidates(logits: Array, sampling: Sampling) -> tuple[Array, Array, Array]:
    """Ids in order of probability (B, C) int32, their scaled logits, and which of them are kept."""
    # top_k puts the lower index first among equals.
    count = sampling.top_k or sampling.num_tokens
    scaled, ids = jax.lax.top_k(_scaled(logits, sampling), count)
    keep = jnp.ones(scaled.shape, bool)
    if sampling.top_p is not None:
        probability = jax.nn.softmax(scaled, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        keep = (before < sampling.top_p).at[:, 0].set(True)
    return ids, scaled, keep
