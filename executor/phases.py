"""How long the parts of a start took, one behind the other.

Owns the clock of one start. Knows nothing of what the parts do. Made by `__main__` when the process
begins, told of each part's end by whoever did it, and logged once the executor is ready;
`gapless.bench` reads that line.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Phases:
    """The parts of one start, in the order in which they first ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """The first part begins now; `clock` tells seconds."""
        self._clock = clock
        self._begin_s = self._last_s = clock()
        self._seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """What went on since the last call was `name`, or one more piece of it."""
        now_s = self._clock()
        self._seconds[name] = self._seconds.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def line(self) -> str:
        """Such as ``ready after 12.31 s: imports 4.20, weights 6.01, graphs 2.10``."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._seconds.items())
        return f"ready after {self._last_s - self._begin_s:.2f} s: {parts}"
