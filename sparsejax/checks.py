"""Arguments as they come from callers: one number, a list, an array, a config, batches of tokens.

Sensible values of other types (NumPy scalars, 0-d arrays of either library) become Python's own;
anything else is one `ValueError` that says what was expected and what came.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from sparsejax.config import ModelConfig


def scalar(value: Any) -> Any:
    """A NumPy scalar or an array of no dimensions as Python's number; everything else unchanged.

    A narrow float becomes the shortest decimal that it stands for: float32(0.1) is meant as 0.1,
    not as 0.10000000149, a fraction of which would round up to one neuron more.
    """
    if isinstance(value, Tracer) or not isinstance(value, np.generic | np.ndarray | jax.Array):
        return value
    if value.ndim or not _numeric(value.dtype):
        return value
    entry = np.asarray(value)[()]
    if jnp.issubdtype(entry.dtype, jnp.floating) and entry.dtype.itemsize < 8:
        told = [float(f"{float(entry):.{digits}g}") for digits in range(1, 10)]
        return next((x for x in told if entry.dtype.type(x) == entry), float(entry))
    return entry.item()


def whole_number(function: str, argument: str, value: Any, least: int = 1) -> int:
    """`value` as a Python integer from `least` on, or ValueError."""
    number = scalar(value)
    # Types of other libraries may say of themselves that they are integers.
    if hasattr(number, "__index__") and not isinstance(number, bool) and not _array(number):
        number = operator.index(number)
        if number >= least:
            return number
    expected = "a positive integer" if least == 1 else f"an integer from {least} on"
    raise ValueError(f"{function}: {argument} must be {expected}, got {value!r}")


def real_number(function: str, argument: str, value: Any, expected: str = "a number") -> float:
    """`value` as a Python float (infinity is one, NaN is not), or ValueError."""
    number = scalar(value)
    plain = isinstance(number, int | float) or hasattr(number, "__index__")
    if not plain or isinstance(number, bool) or _array(number) or number != number:
        raise ValueError(f"{function}: {argument} must be {expected}, got {value!r}")
    return float(number)


def listed(function: str, argument: str, value: Any, expected: str) -> list[Any]:
    """`value` as a list, or ValueError where it is nothing to go through."""
    value = scalar(value)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise ValueError(f"{function}: {argument} must be {expected}, got {value!r}")
    return list(value)


def numbers(function: str, argument: str, value: Any) -> np.ndarray:
    """`value` as an array of numbers or booleans, or ValueError: ragged lists, text, objects."""
    told = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    error = ValueError(f"{function}: {argument} must hold numbers in equal rows, got {told}")
    if isinstance(value, jax.ShapeDtypeStruct):
        raise error
    try:
        array = np.asarray(value)
    except ValueError:  # NumPy's refusal of lists of unequal lengths
        raise error from None
    if not _numeric(array.dtype):
        raise error
    return array


def model_config(function: str, config: Any) -> ModelConfig:
    """`config`, or ValueError where it is none: swapped with the parameters, most likely."""
    if not isinstance(config, ModelConfig):
        raise ValueError(
            f"{function}: config must be a ModelConfig, got {type(config).__name__}; the arguments "
            "are (config, params, ...)"
        )
    return config


def host_ids(tokens: Any) -> Any:
    """Tokens as given, but NumPy's ids that 32 bits do not hold become -1.

    JAX narrows 64-bit integers without a word, and 2**32 + 5 would be looked up as 5; -1 is
    outside of every vocabulary and gives NaN. Arrays of JAX are narrow already.
    """
    wide = _beyond_32_bits(tokens)
    return tokens if wide is None else np.where(wide, -1, tokens.astype(np.int64)).astype(np.int32)


def host_indices(function: str, argument: str, values: Any) -> Any:
    """`values` (positions, documents) as given, or ValueError where 32 bits do not hold them."""
    wide = _beyond_32_bits(values)
    if wide is not None:
        raise ValueError(
            f"{function}: {argument} must hold integers of 32 bits, got {values[wide][0]}"
        )
    return values


def host_batches(function: str, batches: Any) -> Any:
    """Batches for `read_batches`: arrays throughout, fields that are None dropped, ids of 32 bits.

    Args:
      function: who asks, for errors.
      batches: anything; a single batch is returned as it is, for `read_batches` to refuse.

    Raises:
      ValueError: nothing to go through, or (while going) fields that are no arrays of numbers.
    """
    if isinstance(batches, dict) or hasattr(batches, "ndim"):
        return batches
    if not isinstance(batches, Iterable) or isinstance(batches, str | bytes):
        raise ValueError(f"{function}: batches must be an iterable of batches, got {batches!r}")
    return _host_batches(function, batches)


def _host_batches(function: str, batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        given = batch if isinstance(batch, dict) else {"tokens": batch}
        fields: dict[str, Any] = {}
        for name in ("tokens", "positions", "segment_ids", "loss_mask"):
            value = given.get(name)
            if value is None and (name != "tokens" or isinstance(batch, dict)):
                continue
            if not isinstance(value, jax.Array):
                value = numbers(function, f"{name} of a batch", value)
            if name == "tokens":
                value = host_ids(value)
            elif name != "loss_mask":
                value = host_indices(function, name, value)
            fields[name] = value
        # Only names are needed to say what a batch without tokens has instead.
        yield fields if "tokens" in fields else {**dict.fromkeys(given), **fields}


def _array(value: Any) -> bool:
    return hasattr(value, "shape")


def _numeric(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.floating, np.bool_))


def _beyond_32_bits(values: Any) -> np.ndarray | None:
    """Where integers of NumPy do not fit 32 bits; None if all of them do."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
        return None
    if values.dtype.itemsize <= 4:
        return None
    wide = (values > np.iinfo(np.int32).max) | (values < np.iinfo(np.int32).min)
    return wide if wide.any() else None
