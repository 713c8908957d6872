"""The plan of one call, made on the device from a sample of its own pre-activations.

    which way     dense, sparse, or sparse with the hottest neurons apart
    which rows    those with more active neurons than a limit are too long to walk
    hot neurons   those that fire on so many tokens that a small dense layer of them is cheaper

One small kernel after the counts of some 256 rows. Every way is exact, so a bad sample costs time
and nothing else. The costs are those of `cost`, which also has the choice for known counts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton as tl
from pallas_kernels.gated_ffn.config import FFNConfig
from pallas_kernels.gated_ffn.cost import HOT_GAIN, LEVELS, costs, most_hot, row_cost

DENSE, SPARSE, HOT = range(3)
_SAMPLE = 256  # rows
_CHUNK = 8192


class Plan(NamedTuple):
    """What the call is going to do.

    Attributes:
      way: () int32, DENSE, SPARSE or HOT.
      limit: (1,) int32; rows with more active neurons (hot ones aside) go to the dense tail; -1 for
        all rows.
      hot: (H,) int32, hot neurons, ascending, padded with F; of use only where way is HOT.
      hot_words: (ceil(F / 32),) int32, their bits.
    """

    way: Array
    limit: Array
    hot: Array
    hot_words: Array


def _decide(
    nnz, cold_share, enough_hot, *, tokens, sample, features, width, config, training, rule
):
    """(way, limit) as traced scalars; `rule` is "choose", "tail" (no choice but -1) or a way."""
    cost = costs(width, features, training=training)
    number = nnz.astype(jnp.float32)
    live = nnz >= 0

    def mean(rows):
        return jnp.sum(jnp.where(live, rows, 0.0)) / sample

    fixed = cost.row + cost.fixed / tokens

    def walked_cost(share):
        return mean(row_cost(cost, number * share, jnp)) + fixed

    plain, hot = walked_cost(1.0), walked_cost(cold_share) + cost.hot_row
    take_hot = enough_hot * (hot < HOT_GAIN * plain).astype(jnp.int32)
    if rule != "choose":
        take_hot = 0 * take_hot + (1 if rule == HOT else 0)
    walked = number * (1.0 - take_hot.astype(jnp.float32) * (1.0 - cold_share))
    # The limit, in units of a walked entry of the forward pass: a tail row costs F / 77 of them; a
    # tail that is not empty takes 0.65 us per 64 of its two depths before its size matters.
    even = max(1, features // 77)
    tail_entries = 650 * (width + features) / 64 / costs(width, features, training=False).entry
    saved = mean(jnp.maximum(walked - even, 0.0)) * tokens
    low = min(even, config.list_width)
    short = (saved > tail_entries).astype(jnp.int32)
    limit = short * low + (1 - short) * config.list_width
    if config.walk_limit is not None:
        limit = 0 * short + min(config.walk_limit, config.list_width)
    elif rule == "tail":
        # Listing and starting a walked row costs 0.11 of a tail row.
        spared = mean(jnp.maximum(even - number, 0.0))
        all_rows = (spared < 0.11 * even).astype(jnp.int32)
        limit = limit * (1 - all_rows) - all_rows
    if rule == "tail":
        return (limit >= 0).astype(jnp.int32) * SPARSE, limit
    if rule != "choose":
        return 0 * short + rule, limit
    best = jnp.where(take_hot > 0, hot, plain)
    sparse = (best < cost.dense_call(config, training=training)).astype(jnp.int32)
    return sparse * (SPARSE + take_hot * (HOT - SPARSE)), limit


def _plan_kernel(
    nnz_ref, fired_ref, way_ref, limit_ref, hot_ref, words_ref, *, sample, features, most, **shape
):
    rows = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(sample),), 0)
    nnz = tl.load(nnz_ref.at[rows], mask=rows < sample, other=-1)
    chunk = min(_CHUNK, max(32, pl.next_power_of_2(features)))
    lane = lax.broadcasted_iota(jnp.int32, (chunk,), 0)
    chunks = pl.cdiv(features, chunk)
    levels = [max(1, level * sample // 256) for level in LEVELS]

    def fired(k):
        at = k * chunk + lane
        return tl.load(fired_ref.at[at], mask=at < features, other=0)

    # One program does all of this, so its time is the number of sums over a block.
    def count(k, carry):
        total, numbers = carry
        here = fired(k)
        above = [jnp.sum((here > level).astype(jnp.int32)) for level in levels]
        return total + jnp.sum(here), [n + a for n, a in zip(numbers, above, strict=True)]

    zero = jnp.int32(0)
    total, numbers = lax.fori_loop(0, chunks, count, (zero, [zero] * len(levels)))
    # The lowest level whose neurons fit; from the highest down, so that the last one wins.
    level = total * 0 + 2**30
    for bound, number in list(zip(levels, numbers, strict=True))[::-1]:
        fits = (number <= most).astype(jnp.int32)
        level = fits * bound + (1 - fits) * level

    def write(k, carry):
        rank, firings = carry
        here = fired(k)
        is_hot = here > level
        at = rank + lax.cumsum(is_hot.astype(jnp.int32), axis=0) - 1
        # Masked-out lanes point outside.
        tl.store(hot_ref.at[jnp.where(is_hot, at, most + lane)], k * chunk + lane, mask=is_hot)
        word = k * (chunk // 32) + lax.broadcasted_iota(jnp.int32, (chunk // 32,), 0)
        tl.store(words_ref.at[word], tl.pack_bits(is_hot), mask=word < words_ref.shape[0])
        number = jnp.sum(is_hot.astype(jnp.int32))
        return rank + number, firings + jnp.sum(jnp.where(is_hot, here, 0))

    found, firings = lax.fori_loop(0, chunks, write, (zero, zero))
    cold_share = (total - firings).astype(jnp.float32) / jnp.maximum(total, 1).astype(jnp.float32)
    enough = (found > 0).astype(jnp.int32)
    way, limit = _decide(nnz, cold_share, enough, sample=sample, features=features, **shape)
    way_ref[0] = way
    limit_ref[0] = limit
    slot = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(most),), 0)
    padding = slot >= found
    at = jnp.where(padding, slot, most + chunk + slot)
    tl.store(hot_ref.at[at], slot * 0 + features, mask=padding & (slot < most))


def plan(pre: Array, bias: Array | None, width: int, config: FFNConfig, *, training: bool) -> Plan:
    """The plan for pre-activations pre (M, F) + bias (F,) of a layer with D = width."""
    tokens, features = pre.shape
    stride = max(1, tokens // _SAMPLE) | 1  # odd: sequences start at even rows, with long lists
    active = tl.is_active(tl.add_bias(pre[min(7, tokens - 1) % stride :: stride], bias))
    nnz = jnp.sum(active, axis=1, dtype=jnp.int32)
    fired = jnp.sum(active, axis=0, dtype=jnp.int32)
    rule: str | int = {"dense": DENSE, "sparse": SPARSE, "hot": HOT}.get(config.choice, "choose")
    if rule == "choose" and tokens < config.choose_tokens:
        rule = "tail"
    most = most_hot(features, config)
    way, limit, hot, hot_words = tl.pallas_call(
        functools.partial(
            _plan_kernel,
            sample=nnz.shape[0],
            features=features,
            most=most,
            tokens=tokens,
            width=width,
            config=config,
            training=training,
            rule=rule,
        ),
        name="gated_ffn_plan",
        grid=(1,),
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in ((1,), (1,), (most,), (pl.cdiv(features, 32),))
        ],
        num_warps=8,
        num_stages=1,
    )(nnz, fired)
    return Plan(way[0], limit, hot, hot_words)
