"""Counts where the device's time goes, step by step; `protos.bubbles` says what is counted.

Owns the totals and, of the steps in flight, the moments that their results do not know. A few
additions of integers a step: no array, no clock, no allocation that lasts. Called by `loop`.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from gapless.protos.bubbles import BUBBLE_BOUNDS_US, DeviceTime
from gapless.protos.messages import StepNumber
from gapless.protos.slots import SLOT_COUNT, Result

_BOUNDS_NS: Final = tuple(1000 * bound for bound in BUBBLE_BOUNDS_US)


class DeviceTimes:
    """The totals of one scheduler's life."""

    def __init__(self) -> None:
        self._active_ns = 0
        self._no_request_ns = 0
        self._scheduler_ns = 0
        self._border_ns = 0
        self._launch_ns = 0
        self._bubble_counts = [0] * (len(_BOUNDS_NS) + 1)
        self._finished_ns: int | None = None
        """End of the last step that was taken."""
        self._arrived_ns = 0
        # Of the steps in flight, by slot.
        self._idle_until_ns = [0] * SLOT_COUNT
        self._published_ns = [0] * SLOT_COUNT

    def work_arrived(self, now: float) -> None:
        """A request came while nothing was live and no step in flight."""
        self._arrived_ns = int(now * 1e9)

    def published(self, step: StepNumber, published_ns: int) -> None:
        """The frame of `step` stood in its slot at `published_ns`."""
        slot = step % SLOT_COUNT
        self._idle_until_ns[slot], self._arrived_ns = self._arrived_ns, 0
        self._published_ns[slot] = published_ns

    def taken(self, result: Result) -> None:
        """Counts a step and the gap before it; steps come in order."""
        slot = result.step % SLOT_COUNT
        begin, started, finished = self._finished_ns, result.started_ns, result.finished_ns
        self._finished_ns = finished
        self._active_ns += finished - started
        if begin is None:
            return
        end = max(started, begin)
        idle_until = min(max(self._idle_until_ns[slot], begin), end)
        published = min(max(self._published_ns[slot], idle_until), end)
        accepted = min(max(result.accepted_ns, published), end)
        self._no_request_ns += idle_until - begin
        self._scheduler_ns += published - idle_until
        self._border_ns += accepted - published
        self._launch_ns += end - accepted
        self._bubble_counts[bisect_left(_BOUNDS_NS, end - idle_until)] += 1

    def snapshot(self) -> DeviceTime:
        """The totals as they are now."""
        return DeviceTime(
            active_ns=self._active_ns,
            gap_ns=(self._no_request_ns, self._scheduler_ns, self._border_ns, self._launch_ns),
            bubble_counts=tuple(self._bubble_counts),
        )
