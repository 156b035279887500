"""What the scheduler does when it has nothing to do: verify itself and collect garbage.

Owns when that was last done. Called by `loop` at the end of each turn.

The garbage collector runs by itself at no moment: a full collection stops the process for many
milliseconds, which is a bubble. Almost everything here is freed by reference counts; what cycles
there are (tracebacks, mostly) are collected when no step is in flight, and at the latest after
`BUSY_COLLECT_INTERVAL_S`, when it happens behind a published frame.
"""

from __future__ import annotations

import gc
from typing import Final

from gapless.scheduler.core import Core

IDLE_INTERVAL_S: Final = 10.0
"""Shortest time between two rests of an idle scheduler."""
BUSY_COLLECT_INTERVAL_S: Final = 300.0


class Rest:
    """Takes over the garbage collector of the process; make one, at the end of its start."""

    def __init__(self, now: float) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()
        self._last_s = now
        self._rested = True

    def next_at(self, core: Core | None) -> float | None:
        """When there is something to do if nothing else happens; None: nothing ever."""
        if core is None or self._rested or not core.is_idle:
            return None
        return self._last_s + IDLE_INTERVAL_S

    def take(self, now: float, core: Core | None) -> None:
        """Verifies and collects, if this is the moment.

        Raises:
            AssertionError: the core broke one of its invariants.
        """
        if core is None:
            return
        if not core.is_idle:
            self._rested = False
            if now - self._last_s >= BUSY_COLLECT_INTERVAL_S:
                self._last_s = now
                gc.collect(1)
        elif not self._rested and now - self._last_s >= IDLE_INTERVAL_S:
            self._last_s, self._rested = now, True
            core.check()
            gc.collect()
