"""Decode: 1 to 64 tokens, spread over the whole chip; of `down` only rows that fire are read.

With so few tokens the time is the reading of weights and of x, which every program reads whole, the
number of launches, and the trips to memory that wait for each other; there are two launches.

*Hidden*: one program per block of neurons computes their pre-activations for all tokens and, in the
same program, their up projection.
    1 to 4 tokens    whole weight rows go to registers in one request; an up row is read only when
                     its neuron fires
    5 to 16          dots: gate, then up with the rows that no token needs masked out of the loads
    17 and more      dots of gate and up in one walk over x: reading x again costs more than the up
                     rows that it would spare (16 % of them fire for 32 tokens of 30)
It leaves one word per block: which of its neurons any token uses.

*Down*: one program per 16 columns (and, from 17 tokens on, per quarter of the neurons) turns the
words into a list of used neurons, gathers their pieces of `down` (one memory sector each) and
multiplies. Quarters are added afterwards, in their order.

Only the traffic depends on the number of active neurons, so the path is exact for any pattern.
Tokens go in blocks of 32: at 64 the second kernel's dot becomes a warp-group one, and gave wrong
numbers on an H200 (jax 0.11.2).

Numerics: float32 accumulation; pre-activations round to x's dtype before the sign test and h before
the down projection, as in the dense engine.
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

TOKEN_BLOCK = 32
VECTOR_TOKENS = 4
_COLUMNS = 16  # of y per program: 32 bytes of a row, one sector


class _Launch(NamedTuple):
    """How a number of tokens is run.

    Attributes:
      block: neurons per program of the first kernel, at most 32.
      warps, stages: of it.
      together: gate and up in one walk over x.
      gather: rows of `down` per step.
      parts: shares of the neurons, each a program of the second kernel.
    """

    block: int
    warps: int
    stages: int
    together: bool
    gather: int
    parts: int


def _launch(tokens: int, width: int, config: FFNConfig) -> _Launch:
    # One H200, D = 2048, F = 5632, nnz 30, us per layer: at 8 tokens 28.5 with 2 warps and 4
    # stages, 33.8 with 4 and 3. What 17 and more tokens get was not measured yet.
    if _is_vector(tokens, width):
        block = max(1, min(8, 16384 // pl.next_power_of_2(width)))
        warps = 1 << max(1, block * width // 4096).bit_length() - 1  # a power of two
        return _Launch(block, min(8, warps), 3, False, 32, 1)
    if tokens <= 16:
        return _Launch(config.decode_neurons, 2, 4, False, 128, 1)
    return _Launch(config.decode_neurons, 4, 3, True, 128, 4)


def _is_vector(tokens: int, width: int) -> bool:
    return tokens <= VECTOR_TOKENS and width <= 8192


def _store_hidden(h_ref, l1_ref, nnz_ref, block, tokens, neurons, live, real, h, active):
    """Stores h (neurons, tokens) and this block's share of l1 and nnz."""
    inside = real[:, None] & live[None, :]
    here = h_ref.at[tokens[None, :], neurons[:, None]]
    tl.store(here, h.astype(h_ref.dtype), mask=inside)
    tl.store(l1_ref.at[block, tokens], jnp.sum(jnp.abs(h), axis=0), mask=live)
    fired = jnp.sum(active.astype(jnp.int32), axis=0)
    tl.store(nnz_ref.at[block, tokens], fired, mask=live)


def _used_word(used):
    """One int32 whose bit j says whether neuron j of the block is used by any token."""
    lane = lax.broadcasted_iota(jnp.int32, used.shape, 0)
    return jnp.sum(jnp.where(used, jnp.int32(1) << lane, 0))


def _hidden_dot_kernel(*refs, gated, biased, token_block, block, depth, together):
    x_ref, gate_ref, up_ref = refs[:3]
    h_ref, l1_ref, nnz_ref, used_ref = refs[-4:]
    (count, width), features = x_ref.shape, gate_ref.shape[0]
    program, token_group = pl.program_id(0), pl.program_id(1)
    token = token_group * token_block + lax.broadcasted_iota(jnp.int32, (token_block,), 0)
    neuron = program * block + lax.broadcasted_iota(jnp.int32, (block,), 0)
    live, real = token < count, neuron < features
    neurons = jnp.minimum(neuron, features - 1)
    # Rows past the tokens are not read: as copies of the last one, every program asked the same
    # few sectors of L2 for it up to 16 times.
    within = {"mask": live[:, None], "other": 0.0} if count % token_block else {}

    def project(weight_refs, steps, used=None):
        mask = {} if used is None else {"mask": used[:, None], "other": 0.0}

        def step(k, sums):
            column = k * depth + lax.broadcasted_iota(jnp.int32, (depth,), 0)
            right = tl.load(x_ref.at[token[:, None], column[None, :]], **within)
            tiles = [tl.load(w.at[neurons[:, None], column[None, :]], **mask) for w in weight_refs]
            return [
                total + tl.dot(tile, right, trans_b=True)
                for total, tile in zip(sums, tiles, strict=True)
            ]

        zeros = [jnp.zeros((block, token_block), jnp.float32) for _ in weight_refs]
        return lax.fori_loop(0, steps, step, zeros)

    both = gated and together
    pre, *ups = project([gate_ref, up_ref] if both else [gate_ref], width // depth)
    pre = pre.astype(x_ref.dtype)
    if biased:
        pre += refs[3][neurons][:, None]
    pre = pre.astype(jnp.float32)
    active = tl.is_active(pre) & real[:, None] & live[None, :]
    h = pre
    used = jnp.max(active.astype(jnp.int32), axis=1) > 0
    used_ref[token_group, program] = _used_word(used)
    if gated and not together:
        # Not jnp.where(any, steps, 0): a select between two literals lowers to a boolean.
        steps = jnp.minimum(jnp.sum(used.astype(jnp.int32)), 1) * (width // depth)
        ups = project([up_ref], steps, used)
    if gated:
        h = pre * ups[0]
    h = jnp.where(active, h, 0.0)
    _store_hidden(h_ref, l1_ref, nnz_ref, program, token, neuron, live, real, h, active)


def _hidden_vector_kernel(*refs, gated, biased, block):
    x_ref, gate_ref, up_ref = refs[:3]
    h_ref, l1_ref, nnz_ref, used_ref = refs[-4:]
    (count, width), features = x_ref.shape, gate_ref.shape[0]
    program = pl.program_id(0)
    lane = lax.broadcasted_iota(jnp.int32, (block,), 0)
    neuron = program * block + lane
    real = neuron < features
    neurons = jnp.minimum(neuron, features - 1)
    parts = tl.split_width(width)
    weights = [gate_ref[neurons, pl.ds(o, s)] for o, s in parts]
    x = [[x_ref[t, pl.ds(o, s)].astype(jnp.float32) for o, s in parts] for t in range(count)]
    pres, actives = [], []
    for t in range(count):
        products = [
            jnp.sum(w.astype(jnp.float32) * part[None, :], axis=1)
            for w, part in zip(weights, x[t], strict=True)
        ]
        pre = sum(products[1:], products[0]).astype(x_ref.dtype)
        if biased:
            pre += refs[3][neurons]
        pre = pre.astype(jnp.float32)
        pres.append(pre)
        actives.append(tl.is_active(pre) & real)
    hs = [jnp.where(active, pre, 0.0) for pre, active in zip(pres, actives, strict=True)]
    word = _used_word(functools.reduce(jnp.logical_or, actives))
    used_ref[0, program] = word
    if gated:

        def one_neuron(_, carry):
            word, hs = carry
            here = lane == tl.lowest_bit(word)
            at = program * block + tl.lowest_bit(word)
            up = [up_ref[at, pl.ds(o, s)].astype(jnp.float32) for o, s in parts]
            us = [sum(jnp.sum(a * b) for a, b in zip(up, xt, strict=True)) for xt in x]
            hs = [
                jnp.where(here & act, h * u, h) for h, u, act in zip(hs, us, actives, strict=True)
            ]
            return word & (word - 1), hs

        _, hs = lax.fori_loop(0, lax.population_count(word), one_neuron, (word, hs))
    for t in range(count):
        tl.store(h_ref.at[t, neuron], hs[t].astype(h_ref.dtype), mask=real)
        l1_ref[program, t] = jnp.sum(jnp.abs(hs[t]))
        nnz_ref[program, t] = jnp.sum(actives[t].astype(jnp.int32))


def _down_kernel(
    h_ref, down_ref, used_ref, l1_part_ref, nnz_part_ref,
    list_ref, y_ref, l1_ref, nnz_ref, *, token_block, block, gather,
):  # fmt: skip
    count, blocks = h_ref.shape[0], used_ref.shape[1]
    column_block, part, token_group = (pl.program_id(axis) for axis in range(3))
    column_blocks, parts = pl.num_programs(0) - 1, y_ref.shape[0]
    each = pl.cdiv(blocks, parts)
    mine = (token_group * parts + part) * column_blocks + column_block
    token = token_group * token_block + lax.broadcasted_iota(jnp.int32, (token_block,), 0)
    live = token < count

    @pl.when(column_block < column_blocks)
    def _product():
        # This program's own list of used neurons, from one word per block of them.
        lane = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(each),), 0)
        at = part * each + lane
        here = (lane < each) & (at < blocks)
        words = tl.load(used_ref.at[token_group, at], mask=here, other=0)
        counts = lax.population_count(words)
        total = jnp.sum(counts)

        def emit(_, carry):
            words, position = carry
            some = words != 0
            # Masked-out lanes get a slot of their own behind the list.
            slot = jnp.where(some, position, each * block + lane)
            neuron = at * block + tl.lowest_bit(words)
            tl.store(list_ref.at[mine, slot], neuron, mask=some)
            return words & (words - 1), position + 1

        first = lax.cumsum(counts, axis=0) - counts
        lax.fori_loop(0, jnp.max(counts), emit, (words, first))
        tl.barrier()
        column = column_block * _COLUMNS + lax.broadcasted_iota(jnp.int32, (_COLUMNS,), 0)

        def step(k, acc):
            at = k * gather + lax.broadcasted_iota(jnp.int32, (gather,), 0)
            here = at < total
            neurons = tl.load(list_ref.at[mine, at], mask=here, other=0)
            both = live[:, None] & here[None, :]
            h = tl.load(h_ref.at[token[:, None], neurons[None, :]], mask=both, other=0.0)
            where = (neurons[:, None], column[None, :])
            rows = tl.load(down_ref.at[where], mask=here[:, None], other=0.0)
            return acc + tl.dot(h, rows)

        zeros = jnp.zeros((token_block, _COLUMNS), jnp.float32)
        y = lax.fori_loop(0, (total + gather - 1) // gather, step, zeros)
        where = y_ref.at[part, token[:, None], column[None, :]]
        tl.store(where, y.astype(y_ref.dtype), mask=live[:, None])

    # Each part adds up some of the tokens: one program alone would finish last.
    share = token_block // parts
    mine_from = token_group * token_block + part * share

    @pl.when(column_block == column_blocks)
    def _totals():
        lane = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(blocks),), 0)
        token = mine_from + lax.broadcasted_iota(jnp.int32, (share,), 0)
        # Columns past the tokens hold anything and are not stored: a mask would split the loads.
        mask = lax.broadcasted_iota(jnp.int32, (lane.shape[0], share), 0) < blocks
        at = (lane[:, None], token[None, :])
        l1 = tl.load(l1_part_ref.at[at], mask=mask, other=0.0)
        nnz = tl.load(nnz_part_ref.at[at], mask=mask, other=0)
        tl.store(l1_ref.at[token], jnp.sum(l1, axis=0), mask=token < count)
        tl.store(nnz_ref.at[token], jnp.sum(nnz, axis=0), mask=token < count)


def decode(
    x: Array,
    gate: Array | None,
    up: Array,
    down: Array,
    bias: Array | None,
    config: FFNConfig,
) -> list[Array]:
    """y (M, D), l1 (M,) and nnz (M,) of the layer for x (M, D), best for M up to 64."""
    tokens, width = x.shape
    features = up.shape[0]
    gated, biased = gate is not None, bias is not None
    token_block = min(TOKEN_BLOCK, max(16, pl.next_power_of_2(tokens)))
    token_groups = pl.cdiv(tokens, token_block)
    launch = _launch(tokens, width, config)
    block = launch.block
    if _is_vector(tokens, width):
        kernel = functools.partial(_hidden_vector_kernel, gated=gated, biased=biased, block=block)
        grid: tuple[int, ...] = (pl.cdiv(features, block),)
    else:
        kernel = functools.partial(
            _hidden_dot_kernel,
            gated=gated,
            biased=biased,
            token_block=token_block,
            block=block,
            depth=min(config.decode_depth * 2 // x.dtype.itemsize, width & -width),
            together=launch.together,
        )
        grid = (pl.cdiv(features, block), token_groups)
    blocks = grid[0]
    weights = [gate if gate is not None else up, up, *([bias] if bias is not None else [])]
    h, l1_part, nnz_part, used = tl.pallas_call(
        kernel,
        name="gated_ffn_decode_hidden",
        grid=grid,
        out_shape=[
            jax.ShapeDtypeStruct((tokens, features), x.dtype),
            jax.ShapeDtypeStruct((blocks, token_groups * token_block), jnp.float32),
            jax.ShapeDtypeStruct((blocks, token_groups * token_block), jnp.int32),
            jax.ShapeDtypeStruct((token_groups, blocks), jnp.int32),
        ],
        num_warps=launch.warps,
        num_stages=launch.stages,
    )(x, *weights)
    parts = launch.parts
    each = pl.cdiv(blocks, parts)
    lists = (width // _COLUMNS * token_groups * parts, each * block + pl.next_power_of_2(each))
    y_dtype = x.dtype if parts == 1 else jnp.float32
    _, y, l1, nnz = tl.pallas_call(
        functools.partial(_down_kernel, token_block=token_block, block=block, gather=launch.gather),
        name="gated_ffn_decode_down",
        grid=(width // _COLUMNS + 1, parts, token_groups),
        out_shape=[
            jax.ShapeDtypeStruct(lists, jnp.int32),
            jax.ShapeDtypeStruct((parts, tokens, width), y_dtype),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        ],
        num_warps=4,
        num_stages=2,
    )(h, down, used, l1_part, nnz_part)
    return [y[0] if parts == 1 else jnp.sum(y, axis=0).astype(x.dtype), l1, nnz]
