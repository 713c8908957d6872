"""Lists by neuron from lists by token: who fired this neuron, in ascending order of tokens.

The weight gradients sum over tokens, so they need the transposed lists. No sort: every token sets
its bit in a (F, M / 32) mask, one popcount scan per neuron gives the position of every entry, and
one program adds up the neurons' lengths. The bits are set by atomic ORs, whose result does not
depend on their order.

A neuron with many tokens is cut into segments, so that one which fires on every token does not
delay the call. Segments past a neuron's first are numbered apart ("extras"); a neuron with more
than one also gets that many slots for its partial sums, which are added in order later.

Time follows M F / 32 words of mask (11.5 MB at 16,384 x 5,632), not the M F activations.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import _triton as tl

_LIST_CHUNK = 64
_WORD_CHUNK = 512
_NEURON_CHUNK = 2048


class NeuronLists(NamedTuple):
    """Where each (token, neuron) entry stands when entries are ordered by neuron, then token.

    Attributes:
      bits: (F + spare, W) int32, bit t % 32 of word t // 32 set where token t fires the neuron.
      before: (F, W) int32, entries of the neuron in earlier words.
      entries: (F,) int32, entries of the neuron.
      start: (F,) int32, position of its first entry.
      extra: (F,) int32, number of its first extra segment.
      slot: (F,) int32, first partial-sum slot of a neuron with more than one segment.
      totals: (2,) int32, number of extras and of slots in use.
      owner: (extras,) int32, the neuron of each extra segment; unspecified beyond totals[0].
    """

    bits: Array
    before: Array
    entries: Array
    start: Array
    extra: Array
    slot: Array
    totals: Array
    owner: Array


def _bits_kernel(limit_ref, nnz_ref, column_ref, _bits, bits_ref, *, features):
    token = pl.program_id(0)
    nnz = nnz_ref[token]
    lane = lax.broadcasted_iota(jnp.int32, (_LIST_CHUNK,), 0)
    bit = jnp.int32(1) << (token % 32)

    def step(k, carry):
        slot = k * _LIST_CHUNK + lane
        live = slot < nnz
        column = tl.load(column_ref.at[token, slot], mask=live, other=0).astype(jnp.int32)
        # A masked-out lane gets a row of its own behind the neurons.
        row = jnp.where(live, column, features + lane)
        tl.set_bits(bits_ref, (row, token // 32 + 0 * lane), jnp.where(live, bit, 0), live)
        return carry

    @pl.when(nnz <= limit_ref[0])
    def _walked():
        lax.fori_loop(0, (nnz + _LIST_CHUNK - 1) // _LIST_CHUNK, step, 0)


def _before_kernel(bits_ref, before_ref, count_ref, *, chunk):
    neuron = pl.program_id(0)
    words = before_ref.shape[1]
    lane = lax.broadcasted_iota(jnp.int32, (chunk,), 0)

    def step(k, total):
        word = k * chunk + lane
        live = word < words
        counts = lax.population_count(tl.load(bits_ref.at[neuron, word], mask=live, other=0))
        before = total + lax.cumsum(counts, axis=0) - counts
        tl.store(before_ref.at[neuron, word], before, mask=live)
        return total + jnp.sum(counts)

    count_ref[neuron] = lax.fori_loop(0, pl.cdiv(words, chunk), step, jnp.int32(0))


def _starts_kernel(
    count_ref, start_ref, extra_ref, slot_ref, totals_ref, owner_ref, *, chunk, segment
):
    features, extras = count_ref.shape[0], owner_ref.shape[0]
    lane = lax.broadcasted_iota(jnp.int32, (chunk,), 0)

    def exclusive(values, total):
        return total + lax.cumsum(values, axis=0) - values, total + jnp.sum(values)

    def step(k, carry):
        total, extra_total, slot_total = carry
        neuron = k * chunk + lane
        live = neuron < features
        count = tl.load(count_ref.at[neuron], mask=live, other=0)
        more = jnp.maximum(count - 1, 0) // segment
        start, total = exclusive(count, total)
        extra, extra_total = exclusive(more, extra_total)
        slots = more + jnp.minimum(more, 1)
        slot, slot_total = exclusive(slots, slot_total)
        for ref, value in ((start_ref, start), (extra_ref, extra), (slot_ref, slot)):
            tl.store(ref.at[neuron], value, mask=live)

        def own(s, carry):
            mine = s < more
            # Masked-out lanes point outside; live ones never share an index.
            at = jnp.where(mine, extra + s, extras + lane)
            tl.store(owner_ref.at[at], neuron, mask=mine & (at < extras))
            return carry

        lax.fori_loop(0, jnp.max(more), own, 0)
        return total, extra_total, slot_total

    zero = jnp.int32(0)
    _, extra_total, slot_total = lax.fori_loop(
        0, pl.cdiv(features, chunk), step, (zero, zero, zero)
    )
    totals_ref[0] = extra_total
    totals_ref[1] = slot_total


def by_neuron(
    limit: Array, nnz: Array, columns: Array, features: int, *, segment: int, capacity: int
) -> NeuronLists:
    """Positions of all entries of the walked rows when they are ordered by neuron.

    Args:
      limit: (1,) int32; rows with more active columns are left out.
      nnz: (M,) int32.
      columns: (M, width) integers, ascending active columns of each row.
      features: F.
      segment: most entries of one segment.
      capacity: at least the number of entries (the caller's promise; it sizes `owner`).
    """
    tokens = nnz.shape[0]
    words = pl.cdiv(tokens, 32)
    bits_shape = (features + _LIST_CHUNK, words)
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    [bits] = tl.pallas_call(
        functools.partial(_bits_kernel, features=features),
        name="gated_ffn_neuron_bits",
        grid=(tokens,),
        out_shape=[int32(bits_shape)],
        num_warps=1,
        num_stages=1,
        aliases={3: 0},
    )(limit, nnz, columns, jnp.zeros(bits_shape, jnp.int32))
    chunk = min(_WORD_CHUNK, max(32, pl.next_power_of_2(words)))
    before, count = tl.pallas_call(
        functools.partial(_before_kernel, chunk=chunk),
        name="gated_ffn_neuron_before",
        grid=(features,),
        out_shape=[int32((features, words)), int32((features,))],
        num_warps=1,
        num_stages=1,
    )(bits)
    chunk = min(_NEURON_CHUNK, max(32, pl.next_power_of_2(features)))
    start, extra, slot, totals, owner = tl.pallas_call(
        functools.partial(_starts_kernel, chunk=chunk, segment=segment),
        name="gated_ffn_neuron_starts",
        grid=(1,),
        out_shape=[int32((features,))] * 3 + [int32((2,)), int32((max(1, capacity // segment),))],
        num_warps=4,
        num_stages=1,
    )(count)
    return NeuronLists(bits, before, count, start, extra, slot, totals, owner)


def position(bits_ref: Any, before_ref: Any, start_ref: Any, token: Array, column: Array) -> Array:
    """Positions of entries (token, column) in the order by neuron, inside a kernel."""
    word = token // 32 + 0 * column
    below = bits_ref[column, word] & ((jnp.int32(1) << (token % 32)) - 1)
    return start_ref[column] + before_ref[column, word] + lax.population_count(below)
