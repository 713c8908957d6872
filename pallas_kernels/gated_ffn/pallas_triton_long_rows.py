"""Which rows are too long to walk, as the kernels settle it among themselves on the device.

A walk visits one neuron after the other, some 0.55 us each, so a row of hundreds that comes late
holds up the call: the first token of a sequence is such a row in every trained model. The plan
(pallas_triton_plan.py) sets a limit from a sample that hardly sees rows this rare. The lists kernel
sees all rows, and counts two kinds: those beyond the plan's limit, and those beyond `SHORT` only.
Where both together are few, the dense tail takes both (for as many, its time hardly grows), and no
walk is longer than `SHORT`. Where they are many, the plan's limit stands.

Nothing travels to the host and no kernel is added: every program reads the two counts. Their order
in the lists varies from run to run, each row's result does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels import _triton as tl

SHORT = 64  # entries
_FEW = 128  # rows


class LongRows(NamedTuple):
    """Rows that are not walked.

    Attributes:
      counts: (2,) int32, rows beyond the plan's limit; rows beyond `SHORT` alone.
      rows: (M,) int32, the first kind's numbers; unspecified beyond their count.
      short: (`few_rows` or 1,) int32, the second kind's, as many as fit.
    """

    counts: Array
    rows: Array
    short: Array


def few_rows(dtype: Any) -> int:
    """Up to how many rows the tail takes its small tiles; float32 has one kind of tile."""
    return _FEW if jnp.dtype(dtype).itemsize <= 2 else 0


def walk_limit(limit: Any, counts: Any, few: int) -> Any:
    """Rows with more entries than this go to the tail.

    `limit` is the plan's, `counts` as in `LongRows`; with `few` 0 there is no second kind.
    """
    if not few:
        return limit
    are_few = (counts[0] + counts[1] <= few).astype(jnp.int32)
    return are_few * jnp.minimum(limit, SHORT) + (1 - are_few) * limit


def number(counts: Any, few: int) -> Any:
    """Rows of the tail; `counts` holds no second kind where it is not told apart."""
    are_few = (counts[0] + counts[1] <= few).astype(jnp.int32)
    return counts[0] + are_few * counts[1]


def row_at(counts: Any, rows_ref: Any, short_ref: Any, slot: Any, live: Any, other: int) -> Any:
    """Row numbers of the tail's slots, `other` where not live; inside a kernel."""
    beyond = slot >= counts[0]
    first = tl.load(rows_ref.at[slot], mask=live & ~beyond, other=other)
    at = jnp.where(beyond, slot - counts[0], 0)
    second = tl.load(short_ref.at[at], mask=live & beyond, other=other)
    return jnp.where(beyond, second, first)
