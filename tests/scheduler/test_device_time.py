"""The totals of the device's time: worked examples, and the same as a step log gives."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.bench import bubbles
from gapless.protos.bubbles import BUBBLE_BOUNDS_US, DeviceTime
from gapless.protos.messages import Epoch, StepNumber
from gapless.protos.slots import Result
from gapless.scheduler.device_time import DeviceTimes
from tests.bench.logs import step_log

NO_ROWS = np.zeros(0, np.int32)
Moments = tuple[int, int, int, int, int]
"""Of one step, in ns: idle_until (0: never idle), published, accepted, started, finished."""


def counted(steps: list[Moments], depth: int = 1) -> DeviceTime:
    """The totals after `steps`, of which `depth` are in flight at a time."""
    times = DeviceTimes(has_own_clock=False)
    for k in range(len(steps) + depth):
        if k >= depth:
            _, _, accepted, started, finished = steps[k - depth]
            step = StepNumber(k - depth)
            result = Result(Epoch(1), step, NO_ROWS, NO_ROWS, accepted, started, finished)
            times.taken(result, received=0.0)
        if k < len(steps):
            idle_until, published = steps[k][:2]
            if idle_until:
                times.work_arrived((idle_until + 0.5) / 1e9)  # survives the rounding
            times.published(StepNumber(k), published)
    return times.snapshot()


def bucket_of(duration_us: int) -> int:
    counts = counted([(0, 0, 0, 0, 10), (0, 0, 0, 10 + 1000 * duration_us, 10**9)]).bubble_counts
    assert sum(counts) == 1
    return counts.index(1)


def test_the_first_step_has_no_gap() -> None:
    found = counted([(30, 40, 50, 100, 200)])
    assert (found.active_ns, found.gap_ns, sum(found.bubble_counts)) == (100, (0, 0, 0, 0), 0)


def test_a_gap_is_cut_at_its_moments() -> None:
    found = counted([(30, 40, 50, 100, 200), (230, 240, 250, 265, 300)])
    assert (found.active_ns, found.gap_ns) == (135, (30, 10, 10, 15))


def test_time_without_requests_is_no_bubble() -> None:
    an_hour = 3_600 * 10**9
    second = (an_hour, an_hour + 1, an_hour + 2, an_hour + 3, 2 * an_hour)
    found = counted([(0, 0, 0, 0, 1), second])
    assert found.gap_ns == (an_hour - 1, 1, 1, 1)
    assert found.bubble_counts[0] == 1


def test_bounds_are_inclusive_and_the_last_bucket_has_none() -> None:
    assert [bucket_of(bound) for bound in BUBBLE_BOUNDS_US] == list(range(13))
    assert [bucket_of(duration) for duration in (0, 3, 10_001, 999_999)] == [0, 2, 13, 13]


times = st.integers(0, 30_000_000)


@given(st.lists(st.tuples(*[times] * 5), min_size=1, max_size=20), st.integers(1, 2))
def test_totals_are_those_of_the_step_log(steps: list[Moments], depth: int) -> None:
    found = counted(steps, depth)
    records = step_log([(idle, 0, *rest, 0, 0) for idle, *rest in steps])
    parts_ns = bubbles.gaps_of(records).parts_ns
    assert list(found.gap_ns) == parts_ns.sum(axis=0).tolist()
    assert found.active_ns == (records["finished_ns"] - records["started_ns"]).sum()
    buckets = [0] * 14
    for bubble_ns in parts_ns[:, 1:].sum(axis=1).tolist():
        buckets[bisect_left(BUBBLE_BOUNDS_US, bubble_ns / 1000)] += 1
    assert list(found.bubble_counts) == buckets


STEP_NS = 10_000_000


def with_drift(ppm: int, step_count: int, *, has_own_clock: bool) -> DeviceTime:
    """Steps of 10 ms; before each the device waits 60, 30 and 10 µs for its three causes."""
    times = DeviceTimes(has_own_clock=has_own_clock)
    begin = now = 10**12
    for k in range(step_count):
        published, accepted, started = now + 60_000, now + 90_000, now + 100_000
        now = started + STEP_NS
        times.published(StepNumber(k), published)
        behind = [(at - begin) * ppm // 10**6 for at in (started, now)]
        stamps = accepted, started - behind[0], now - behind[1]
        result = Result(Epoch(1), StepNumber(k), NO_ROWS, NO_ROWS, *stamps)
        times.taken(result, received=(now + 20_000 + 1000 * (k % 7)) / 1e9)
    return times.snapshot()


@pytest.mark.parametrize("ppm", [-20, 0, 20])
def test_a_drifting_clock_does_not_change_the_causes(ppm: int) -> None:
    found = with_drift(ppm, 6000, has_own_clock=True)
    us_per_step = [gap_ns / 5999 / 1000 for gap_ns in found.gap_ns]
    # Between two windows it may be off by a second's drift or two.
    assert us_per_step == pytest.approx([0, 60, 30, 10], abs=abs(2 * ppm) + 3)


def test_what_drift_would_do() -> None:
    found = with_drift(20, 6000, has_own_clock=False)
    assert found.gap_ns[1] / 5999 / 1000 > 95
