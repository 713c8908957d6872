"""The letters used for dimensions, and the array aliases built on them.

| letter | dimension |
|---|---|
| B | batch (sequences) |
| T | positions in a sequence |
| S | slots of a key/value cache |
| D | model width, `d_model` |
| F | feed-forward width, `d_ff` (neurons of one layer) |
| H | query heads |
| G | key/value heads (H is a multiple of G) |
| K | width of one head, `head_dim` |
| V | vocabulary |
| L | layers that have a feed-forward part |
"""

from __future__ import annotations

from typing import Any, TypeAlias

from jax import Array
from jaxtyping import Bool, Float, Int

Params: TypeAlias = dict[str, Any]
"""A plain nested dict of arrays (or `jax.ShapeDtypeStruct`s): the model's state."""

Tokens: TypeAlias = Int[Array, "B T"]
Hidden: TypeAlias = Float[Array, "B T D"]
Logits: TypeAlias = Float[Array, "B T V"]
Queries: TypeAlias = Float[Array, "B T H K"]
Keys: TypeAlias = Float[Array, "B T G K"]
Mask: TypeAlias = Bool[Array, "B T"]
