"""Decode: 1 to 64 tokens, spread over the whole chip, reading only the weight rows that fire.

With so few tokens the time is the reading of weights, the number of launches, and the trips to
memory that wait for each other; there are two launches, and nothing is added across programs.

*Hidden*: one program per block of neurons computes their pre-activations for all tokens and, in the
same program, the up projection of those neurons that any token uses. Up to 4 tokens, whole weight
rows go to registers in one request and an up row is read only when its neuron fires; from 5 tokens
on it is a dot, with the rows of `up` that no token needs masked out of the loads. It leaves one
word per block: which of its neurons any token uses.

*Down*: one program per 16 columns turns the words into a list of used neurons, gathers their pieces
of `down` (one memory sector each) and multiplies.

Only the traffic depends on the number of active neurons, so the path is exact for any pattern.
Tokens go in blocks of 32: at 64 the second kernel's dot becomes a warp-group one, and gave wrong
numbers on an H200 (jax 0.11.2).

Numerics: float32 accumulation; pre-activations round to x's dtype before the sign test and h before
the down projection, as in the dense engine.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton as tl
from pallas_kernels.gated_ffn.config import FFNConfig

TOKEN_BLOCK = 32
VECTOR_TOKENS = 4
_COLUMNS = 16  # of y per program: 32 bytes of a row, one sector
_GATHER = (32, 128)  # rows of `down` per step, for few and for more tokens


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


def _hidden_dot_kernel(*refs, gated, biased, token_block, block, depth):
    x_ref, gate_ref, up_ref = refs[:3]
    h_ref, l1_ref, nnz_ref, used_ref = refs[-4:]
    (count, width), features = x_ref.shape, gate_ref.shape[0]
    program, token_group = pl.program_id(0), pl.program_id(1)
    token = token_group * token_block + lax.broadcasted_iota(jnp.int32, (token_block,), 0)
    neuron = program * block + lax.broadcasted_iota(jnp.int32, (block,), 0)
    live, real = token < count, neuron < features
    rows, neurons = jnp.minimum(token, count - 1), jnp.minimum(neuron, features - 1)

    def project(weight_ref, steps, used=None):
        mask = {} if used is None else {"mask": used[:, None], "other": 0.0}

        def step(k, acc):
            column = k * depth + lax.broadcasted_iota(jnp.int32, (depth,), 0)
            a = tl.load(weight_ref.at[neurons[:, None], column[None, :]], **mask)
            return acc + tl.dot(a, x_ref[rows, pl.ds(k * depth, depth)], trans_b=True)

        return lax.fori_loop(0, steps, step, jnp.zeros((block, token_block), jnp.float32))

    pre = project(gate_ref, width // depth).astype(x_ref.dtype)
    if biased:
        pre += refs[3][neurons][:, None]
    pre = pre.astype(jnp.float32)
    active = tl.is_active(pre) & real[:, None] & live[None, :]
    h = pre
    used = jnp.max(active.astype(jnp.int32), axis=1) > 0
    used_ref[token_group, program] = _used_word(used)
    if gated:
        # Not jnp.where(any, steps, 0): a select between two literals lowers to a boolean.
        steps = jnp.minimum(jnp.sum(used.astype(jnp.int32)), 1) * (width // depth)
        h = pre * project(up_ref, steps, used)
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
    count = h_ref.shape[0]
    column_block, token_group = pl.program_id(0), pl.program_id(1)
    token = token_group * token_block + lax.broadcasted_iota(jnp.int32, (token_block,), 0)
    live = token < count
    # This program's own list of used neurons, from one word per block of them.
    mine = token_group * pl.num_programs(0) + column_block
    blocks = used_ref.shape[1]
    lane = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(blocks),), 0)
    words = tl.load(used_ref.at[token_group, lane], mask=lane < blocks, other=0)
    counts = lax.population_count(words)
    total = jnp.sum(counts)

    def emit(_, carry):
        words, position = carry
        some = words != 0
        # Masked-out lanes get a slot of their own behind the list.
        slot = jnp.where(some, position, blocks * block + lane)
        neuron = lane * block + tl.lowest_bit(words)
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
    tl.store(y_ref.at[token[:, None], column[None, :]], y.astype(y_ref.dtype), mask=live[:, None])

    @pl.when(column_block == 0)
    def _totals():
        mask = (lane < blocks)[:, None] & live[None, :]
        at = (lane[:, None], token[None, :])
        l1 = tl.load(l1_part_ref.at[at], mask=mask, other=0.0)
        nnz = tl.load(nnz_part_ref.at[at], mask=mask, other=0)
        tl.store(l1_ref.at[token], jnp.sum(l1, axis=0), mask=live)
        tl.store(nnz_ref.at[token], jnp.sum(nnz, axis=0), mask=live)


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
    vector = tokens <= VECTOR_TOKENS and width <= 8192
    if vector:
        block = max(1, min(8, 16384 // pl.next_power_of_2(width)))
        warps = min(8, max(1, block * width // 4096))
        kernel = functools.partial(_hidden_vector_kernel, gated=gated, biased=biased, block=block)
        grid: tuple[int, ...] = (pl.cdiv(features, block),)
    else:
        block, warps = config.decode_neurons, 4
        kernel = functools.partial(
            _hidden_dot_kernel,
            gated=gated,
            biased=biased,
            token_block=token_block,
            block=block,
            depth=min(config.decode_depth * 2 // x.dtype.itemsize, width & -width),
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
            jax.ShapeDtypeStruct((blocks, tokens), jnp.float32),
            jax.ShapeDtypeStruct((blocks, tokens), jnp.int32),
            jax.ShapeDtypeStruct((token_groups, blocks), jnp.int32),
        ],
        num_warps=warps,
        num_stages=3,
    )(x, *weights)
    slots = blocks * block + pl.next_power_of_2(blocks)
    _, y, l1, nnz = tl.pallas_call(
        functools.partial(
            _down_kernel,
            token_block=token_block,
            block=block,
            gather=_GATHER[tokens > VECTOR_TOKENS],
        ),
        name="gated_ffn_decode_down",
        grid=(width // _COLUMNS, token_groups),
        out_shape=[
            jax.ShapeDtypeStruct((width // _COLUMNS * token_groups, slots), jnp.int32),
            jax.ShapeDtypeStruct((tokens, width), x.dtype),
            jax.ShapeDtypeStruct((tokens,), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        ],
        num_warps=4,
        num_stages=2,
    )(h, down, used, l1_part, nnz_part)
    return [y, l1, nnz]
