"""Which engine runs an op: static predicates that return reasons, never try/except around a call.

An engine is named by a string (`"triton"`, `"xla"`). For each call, an op hands `select` an ordered
mapping from engine name to a predicate's answer: `None` when the engine can run these arguments, or
the reason why not. A missing capability is therefore a sentence the caller can read, and never a
wrong number or a half-compiled program.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

_INTERPRET = contextvars.ContextVar("pallas_kernels_interpret", default=False)


class UnsupportedError(NotImplementedError):
    """An explicitly requested engine cannot run these arguments; the message carries the reason."""


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Runs Pallas kernels in interpret mode inside the block, so `"triton"` works without a GPU.

    For tests: slow, and traced functions must be traced inside the block.
    """
    token = _INTERPRET.set(True)
    try:
        yield
    finally:
        _INTERPRET.reset(token)


def interpreting() -> bool:
    """True inside `with interpret():`."""
    return _INTERPRET.get()


def select(op: str, implementation: str | None, reasons: Mapping[str, str | None]) -> str:
    """Returns the engine to run: the requested one, or the first without a reason against it.

    Args:
      op: the op's public name, for messages.
      implementation: an engine's name, or None to choose.
      reasons: engine name -> None (can run) or why it cannot, in order of preference.

    Returns:
      The engine's name.

    Raises:
      ValueError: `implementation` is not a known engine of this op.
      UnsupportedError: the requested engine (or, with None, every engine) cannot run.
    """
    if implementation is not None:
        if implementation not in reasons:
            raise ValueError(
                f"{op}: implementation must be one of {sorted(reasons)} or None, "
                f"got {implementation!r}"
            )
        reason = reasons[implementation]
        if reason is not None:
            raise UnsupportedError(f"{op}: implementation={implementation!r} cannot run: {reason}")
        return implementation
    for name, reason in reasons.items():
        if reason is None:
            return name
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UnsupportedError(f"{op}: no engine can run this call ({listed})")
