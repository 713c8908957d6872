"""SIGTERM, a closed terminal and Ctrl-C as a request to save and leave, agreed on by all."""

from __future__ import annotations

import signal
import types

import jax
import numpy as np
from jax.experimental import multihost_utils


class Interrupt:
    """Context manager; `requested(step)` turns True once a signal has come.

    The first signal only sets a flag, so that the step under way ends and a checkpoint is written;
    the handlers found on entry are then back, and a second Ctrl-C interrupts at once. In a run of
    several processes the signal may reach one of them only: every `agree_every` steps they compare,
    so that all leave after the same step.
    """

    def __init__(self, agree_every: int = 10):
        self._agree_every = agree_every
        self._signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._restore_handlers()

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        self._signal = number
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._previous = {}

    def requested(self, step: int) -> str | None:
        """The signal's name if the run should end after `step`, else None."""
        number = self._signal or 0
        if jax.process_count() > 1:
            if step % self._agree_every:
                return None
            number = int(np.max(multihost_utils.process_allgather(np.int32(number))))
        return signal.Signals(number).name if number else None
