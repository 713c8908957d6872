"""Which window scores which token: every token of a text exactly once, the tail included."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Window(NamedTuple):
    """The model sees the targets [start, stop), each after those before it in the window.

    Those of [first, stop) are scored here; the others are context, scored by an earlier window.
    """

    start: int
    first: int
    stop: int


@dataclasses.dataclass(frozen=True)
class WindowPlan:
    """Windows over `num_tokens` targets; their scored ranges follow each other without a gap.

    Window i starts at i * stride. The first scores all it holds, a later one its last `stride`
    targets, which so have at least `window - stride` targets before them. The last window may be
    shorter.

    Attributes:
      num_tokens: how many targets.
      window: the most targets of one window.
      stride: from one start to the next; None takes `window`, so that windows do not overlap.
      full_tail: move the last window left until it is full, as lm-evaluation-harness does.
    """

    num_tokens: int
    window: int
    stride: int | None = None
    full_tail: bool = False

    def __post_init__(self):
        if self.num_tokens < 1:
            raise ValueError(f"there is no token to score: num_tokens is {self.num_tokens}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if not 1 <= self.step <= self.window:
            raise ValueError(
                f"stride must be in [1, window = {self.window}], got {self.stride}: a longer one "
                "would leave tokens out"
            )

    @property
    def step(self) -> int:
        """From one start to the next."""
        return self.window if self.stride is None else self.stride

    def __len__(self) -> int:
        return 1 + -(-max(0, self.num_tokens - self.window) // self.step)

    def __getitem__(self, index: int) -> Window:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.step
        first = start if index == 0 else start + self.window - self.step
        stop = min(start + self.window, self.num_tokens)
        if self.full_tail:
            start = max(0, stop - self.window)
        return Window(start, first, stop)
