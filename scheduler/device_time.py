"""Counts where the device's time goes, step by step; `protos.bubbles` says what is counted.

Owns the totals and, of the steps in flight, the moments that their results do not know. A few
additions of integers a step: no array, no clock, no allocation that lasts. Called by `loop`.

A GPU stamps with a timer of its own, which the executor compares with the host's clock once, at its
start. Ten millionths of drift are half a millisecond a minute: nothing to the length of a step or a
gap, but the moments at which a gap is cut would soon lie outside it. So the drift is followed here,
for the cuts alone; see `Drift`.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from gapless.protos.bubbles import BUBBLE_BOUNDS_US, DeviceTime
from gapless.protos.messages import StepNumber
from gapless.protos.slots import SLOT_COUNT, Result

_BOUNDS_NS: Final = tuple(1000 * bound for bound in BUBBLE_BOUNDS_US)


DRIFT_WINDOW_STEPS: Final = 64
DRIFT_WINDOW_NS: Final = 1_000_000_000
"""A window is as long as both say at least."""


class Drift:
    """How far the device's clock has fallen behind the host's since the first window of steps.

    The least time from the end of a step to its result's arrival does not change; if it seems to,
    the clocks have drifted.
    """

    def __init__(self) -> None:
        self.behind_ns = 0
        """As the last whole window shows it; negative if the device's clock runs ahead."""
        self._first_ns: int | None = None
        self._least_ns: int | None = None
        self._step_count = 0
        self._opened_ns = 0

    def step(self, finished_ns: int, received_ns: int) -> None:
        """Takes note of a step, by the device's clock and by the host's."""
        delay_ns = received_ns - finished_ns
        if self._least_ns is None:
            self._least_ns, self._opened_ns = delay_ns, received_ns
        elif delay_ns < self._least_ns:
            self._least_ns = delay_ns
        self._step_count += 1
        is_long = received_ns - self._opened_ns >= DRIFT_WINDOW_NS
        if is_long and self._step_count >= DRIFT_WINDOW_STEPS:
            if self._first_ns is None:
                self._first_ns = self._least_ns
            self.behind_ns = self._least_ns - self._first_ns
            self._least_ns, self._step_count = None, 0


class DeviceTimes:
    """The totals of one scheduler's life."""

    def __init__(self, *, has_own_clock: bool) -> None:
        """`has_own_clock`: the device's stamps are of a timer that drifts."""
        self._drift = Drift() if has_own_clock else None
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

    @property
    def behind_ns(self) -> int:
        """How far the device's clock has fallen behind the host's since its first steps."""
        return 0 if self._drift is None else self._drift.behind_ns

    def work_arrived(self, now: float) -> None:
        """A request came while nothing was live and no step in flight."""
        self._arrived_ns = int(now * 1e9)

    def published(self, step: StepNumber, published_ns: int) -> None:
        """The frame of `step` stood in its slot at `published_ns`."""
        slot = step % SLOT_COUNT
        self._idle_until_ns[slot], self._arrived_ns = self._arrived_ns, 0
        self._published_ns[slot] = published_ns

    def taken(self, result: Result, received: float) -> None:
        """Counts a step, whose word was read at `received`, and the gap before it.

        Steps come in order.
        """
        slot = result.step % SLOT_COUNT
        begin, started, finished = self._finished_ns, result.started_ns, result.finished_ns
        self._finished_ns = finished
        self._active_ns += finished - started
        if begin is None:
            return
        if self._drift is not None:
            self._drift.step(finished, int(received * 1e9))
        behind = self.behind_ns
        end = max(started, begin)
        idle_until = min(max(self._idle_until_ns[slot] - behind, begin), end)
        published = min(max(self._published_ns[slot] - behind, idle_until), end)
        accepted = min(max(result.accepted_ns - behind, published), end)
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
