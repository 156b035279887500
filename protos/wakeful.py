"""When scheduler and executor stay awake for each other's words, and when they sleep for one.

Owns the rule, which both ends follow: it helps little if one of them sleeps. Knows nothing of
sockets and devices. Called by the scheduler's `loop` and the executor's `watcher`.

A thread that sleeps until something comes begins late, by 50 to 300 µs on a virtual machine, and
then runs on cold caches. At depth 2 the device does not notice while a step is longer than the
host's whole path; a shorter one it finishes before the next is there. So while steps are short and
one is in flight, each end looks again and again, which takes a core from each, and never for longer
than a short step after the last result. Before each look it gives way to whoever waits for the core
(ZeroMQ's own threads among them): without that, two ends awake on two cores lost a twentieth.
"""

from __future__ import annotations

import os
from typing import Final

SHORT_STEP_NS: Final = 3_000_000
"""Twice the host's path with sleep in it, 1.1 to 1.4 ms on one H200 machine: it varies."""
CORES_MIN: Final = 4
"""Both ends awake, and as many cores again for everybody else."""


class Wakeful:
    """Says how long one end of the border stays awake."""

    def __init__(self, core_count: int) -> None:
        """With fewer than CORES_MIN it sleeps.

        Args:
            core_count: what the process may use; 0 where there is no GPU, because the executor's
                own threads compute then and nobody takes a core from them.
        """
        self._may = core_count >= CORES_MIN
        self._until_ns = 0

    def step_ended(self, step_ns: int, now_ns: int) -> None:
        """A result came that took the device `step_ns`; the next step is taken to be alike."""
        is_short = step_ns < SHORT_STEP_NS
        self._until_ns = now_ns + SHORT_STEP_NS if self._may and is_short else now_ns

    def stays_awake(self, now_ns: int) -> bool:
        """Whether to look once more instead of sleeping; asked, with a step in flight, before each.

        Times are CLOCK_MONOTONIC.
        """
        if now_ns >= self._until_ns:
            return False
        os.sched_yield()
        return True
