"""Text generation: one prefill of all prompts, then one token per row and step, with a cache.

>>> generate(config, params, [[1, 2, 3], [4]], max_new_tokens=16)  # two lists of new ids

Prompts of one batch may differ in length. The host asks for the next tokens before it reads the
last ones, so that the device does not wait for it. `sparsejax.decoding` holds the programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from sparsejax.config import ModelConfig
from sparsejax.decoding import ENDED, MAX_STEPS_PER_CALL, Chooser, Decoder, State, compute_params
from sparsejax.modules import Options
from sparsejax.params import check_params
from sparsejax.sampling import NOT_FINITE, make_sampling
from sparsejax.sharding import BATCH_AXES, tree_shardings
from sparsejax.types import Params

__all__ = ["ENDED", "MAX_STEPS_PER_CALL", "compute_params", "generate", "row_keys", "stream"]


def generate(
    config: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    key: Array | None = None,
    eos_id: int | Sequence[int] | None = None,
    num_tokens: int | None = None,
    options: Options = Options(),
    mesh: Mesh | None = None,
    cache_dtype: str | None = None,
) -> list[list[int]]:
    """Continues every prompt by up to `max_new_tokens` ids; returns the new ids of each.

    Args:
      config: the model.
      params: its parameters. They are cast to `config.dtype` once per call; for many calls do it
        once with `compute_params`.
      prompts: ids of each prompt, at least one each; lengths may differ.
      max_new_tokens: longest continuation.
      temperature: 0 is greedy; above, ids are drawn from softmax(logits / temperature).
      top_p: draw from the smallest set of tokens whose probabilities sum to top_p or more.
      top_k: draw from the top_k most probable tokens (before top_p).
      key: PRNG key, needed when temperature > 0; row r uses `row_keys(key, B)[r]`. Or such an array
        (B,) itself. What a row draws depends on its key and prompt, not on the other rows.
      eos_id: a row ends with this id, or with any of these, which is then its last one; None ends
        no row early.
      num_tokens: the tokenizer's vocabulary where `config.vocab_size` is padded: ids from it on
        are never emitted.
      options: engine of the feed-forward layers.
      mesh: spreads rows over data and fsdp, heads, neurons and vocabulary over tensor.
      cache_dtype: dtype of keys and values in the cache; None for `config.dtype`.

    Returns:
      One list of new ids per prompt.

    Raises:
      ValueError: an argument out of its range, or parameters that do not fit the config.
      FloatingPointError: logits are NaN or infinite.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for ids in stream(
        config,
        params,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        key=key,
        eos_id=eos_id,
        num_tokens=num_tokens,
        options=options,
        mesh=mesh,
        cache_dtype=cache_dtype,
        steps_per_call=MAX_STEPS_PER_CALL,
    ):
        for row, new in zip(rows, ids.tolist(), strict=True):
            if new != ENDED:
                row.append(new)
    return rows


def stream(
    config: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    key: Array | None = None,
    eos_id: int | Sequence[int] | None = None,
    num_tokens: int | None = None,
    options: Options = Options(),
    mesh: Mesh | None = None,
    cache_dtype: str | None = None,
    steps_per_call: int = 1,
) -> Iterator[np.ndarray]:
    """`generate` as an iterator: per step the (B,) int32 new ids, `ENDED` (-1) for ended rows.

    Stops when all rows have ended. Arguments are checked at once, not at the first step.

    Args:
      steps_per_call: steps the device runs before the host sees their ids, up to
        `MAX_STEPS_PER_CALL`: 1 for text as it is made, more for speed.

    The other arguments and the errors are those of `generate`.
    """
    sampling = make_sampling(
        config.vocab_size,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        num_tokens=num_tokens,
    )
    rows = _check_prompts(config, prompts, max_new_tokens, sampling.num_tokens)
    given = [] if eos_id is None else np.atleast_1d(np.asarray(eos_id)).tolist()
    for each in given:
        if not isinstance(each, int) or not 0 <= each < sampling.num_tokens:
            raise ValueError(
                f"eos_id must be an id of the vocabulary, 0..{sampling.num_tokens - 1}, got {each}"
            )
    if not 1 <= steps_per_call <= MAX_STEPS_PER_CALL:
        raise ValueError(
            f"steps_per_call must be in [1, {MAX_STEPS_PER_CALL}], got {steps_per_call}"
        )
    keys = None if sampling.temperature is None else _check_keys(key, len(rows))
    check_params(config, params)
    if mesh is not None:
        params = jax.device_put(params, tree_shardings(mesh, params))

    decoder = Decoder(config, options, mesh)
    params = decoder.cast(params)

    # A mesh wants the rows to divide; rows added here have ended before they begin.
    ways = 1 if mesh is None else int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))
    batch = -(-len(rows) // ways) * ways
    lengths = np.array([len(row) for row in rows] + [1] * (batch - len(rows)), np.int32)
    longest = int(lengths.max())
    width = min(_bucket(longest), config.context_length)
    slots = max(width, min(_bucket(longest + max_new_tokens), config.context_length))
    tokens = np.zeros((batch, width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    if keys is not None:
        keys = keys[np.minimum(np.arange(batch), len(rows) - 1)]
    eos = np.array(given or [ENDED], np.int32)
    chooser = Chooser(sampling, keys, eos)
    ended = np.arange(batch) >= len(rows)

    def prefill() -> tuple[State, Array]:
        return decoder.prefill(params, tokens, lengths, ended, chooser, slots, cache_dtype)

    def decode(state: State, steps: int) -> tuple[State, Array]:
        return decoder.decode(params, state, chooser, steps)

    return _steps(prefill, decode, len(rows), max_new_tokens, steps_per_call, eos)


def _steps(
    prefill: Callable,
    decode: Callable,
    batch: int,
    total: int,
    steps_per_call: int,
    eos: np.ndarray,
) -> Iterator[np.ndarray]:
    if total == 0:
        return
    state, pending = prefill()
    asked, seen = 1, 0
    ended = np.zeros(batch, bool)
    while pending is not None:
        # Asked for before the last ids are read: the device never waits for the host.
        following, steps = None, min(steps_per_call, total - asked)
        if steps:
            state, following = decode(state, steps)
        for ids in np.asarray(pending)[:batch, : asked - seen].T:
            if ended.all():
                return
            if (ids == NOT_FINITE).any():
                raise FloatingPointError(
                    f"logits of prompt {int(np.argmax(ids == NOT_FINITE))} are not finite at new "
                    f"token {seen}: the parameters hold NaN or infinity, or the compute dtype "
                    "overflows"
                )
            seen += 1
            yield ids.copy()
            ended |= np.isin(ids, eos) | (ids == ENDED)
        pending, asked = following, asked + steps


def row_keys(key: Array, batch: int) -> Array:
    """Keys (B,) of the rows of a batch: `fold_in(key, row)`."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch))


def _bucket(n: int) -> int:
    """n rounded up to one of four sizes per power of two, so that few programs are compiled."""
    step = max(16, 1 << max(0, (n - 1).bit_length() - 3))
    return -(-n // step) * step


def _check_keys(key: Array | None, batch: int) -> Array:
    if key is None:
        raise ValueError("key is needed when temperature > 0; pass key=jax.random.key(seed)")
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    keys: Array = key if typed else jax.random.wrap_key_data(key)
    if keys.ndim == 0:
        return row_keys(keys, batch)
    if keys.shape != (batch,):
        raise ValueError(
            f"key must be one key or one per prompt, shape () or ({batch},), got {keys.shape}"
        )
    return keys


def _check_prompts(
    config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int, num_tokens: int
) -> list[np.ndarray]:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if len(prompts) == 0:
        raise ValueError("prompts is empty; pass at least one prompt, a list of ids")
    rows = []
    for i, prompt in enumerate(prompts):
        row = np.asarray(prompt)
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(
                f"prompts[{i}] must be a list of token ids, got {prompt!r}; prompts is a list of "
                "such lists (encode text with the tokenizer; wrap a single prompt in a list)"
            )
        if row.size == 0:
            raise ValueError(
                f"prompts[{i}] is empty; a prompt needs at least one id: start from the "
                "tokenizer's end-of-text id to generate a document from nothing"
            )
        outside = (row < 0) | (row >= num_tokens)
        if outside.any():
            at = int(np.argmax(outside))
            raise ValueError(
                f"prompts[{i}][{at}] is {row[at]}, outside the vocabulary 0..{num_tokens - 1}; "
                "the prompt was encoded with another tokenizer"
            )
        if len(row) + max_new_tokens > config.context_length:
            raise ValueError(
                f"prompts[{i}] has {len(row)} ids; with max_new_tokens = {max_new_tokens} it comes "
                f"to {len(row) + max_new_tokens} positions, beyond context_length = "
                f"{config.context_length}; shorten the prompt or lower max_new_tokens (together at "
                f"most {config.context_length})"
            )
        rows.append(row)
    return rows
