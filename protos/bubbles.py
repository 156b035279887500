"""Where the device's time goes: what is counted, by name, and how a gap is cut.

A step is *active* from its first stamp on the device to its last. The *gap* of step N is the time
from the end of step N-1 on the device to the beginning of step N; the first step has none. It is
cut at three moments, each of which counts only as far as it lies within the gap; so the four parts
are never negative, and their sum is the gap::

    finished(N-1)    idle_until(N)    published(N)      accepted(N)       started(N)
    │── no request ──│── scheduler ───│─ border, upload ─│──── launch ─────│
                     ╰────────────────── bubble ────────────────────────────╯

no request      Nothing was live and no step in flight: nobody had any work. Not a bubble.
scheduler       The frame of step N did not stand in its slot: the result of N-1 (or, at depth 2, of
                N-2) was on its way, was taken, or N was being built.
border, upload  The frame stood there; its word was sent, was on its way, the executor read it and
                issued the copy to the device.
launch          The step was accepted: the copy itself, the enqueuing of its kernels, their start.

What the device does within a step is the device's own affair. The moments are those of
`step_log.StepColumn`. The scheduler counts them as they happen, the benchmark takes them from a
step log; a test holds the two together.
"""

from __future__ import annotations

from typing import Final

import msgspec

CAUSES: Final = ("no request", "scheduler", "border and upload", "launch")
"""The parts of a gap, in the order of time."""

BUBBLE_BOUNDS_US: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""Upper bounds, each inclusive, of the buckets of the histogram of bubbles; one more has none."""

STEP_BOUNDS_US: Final = tuple(round(100 * 2 ** (k / 16)) for k in range(257))
"""Upper bounds, each inclusive, of the buckets of the histogram of steps: 0.1 ms to 6.6 s, each 4 %
above the one before; one bucket more has none."""


class DeviceTime(msgspec.Struct, frozen=True):
    """Totals since the device's first step, which only grow."""

    active_ns: int = 0
    gap_ns: tuple[int, int, int, int] = (0, 0, 0, 0)
    """By cause, in the order of CAUSES."""
    bubble_counts: tuple[int, ...] = (0,) * (len(BUBBLE_BOUNDS_US) + 1)
    """How many bubbles were how long, one count a bucket; a step without one has one of 0 ns."""
