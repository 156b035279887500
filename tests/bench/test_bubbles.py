"""Gaps and their parts: worked examples, and sums over arbitrary logs."""

from __future__ import annotations

import statistics

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gapless.bench import bubbles
from gapless.protos.bubbles import CAUSES
from tests.bench.logs import FIRST_NS, step_log

BEFORE = (0, 10, 20, 30, 100, 200, 210, 220)


def parts(second: tuple[int, ...]) -> list[int]:
    found: list[int] = bubbles.gaps_of(step_log([BEFORE, second])).parts_ns[0].tolist()
    return found


def test_a_gap_is_cut_at_the_frame_and_at_its_acceptance() -> None:
    assert parts((0, 221, 240, 250, 265, 300, 310, 320)) == [0, 40, 10, 15]


def test_idle_time_is_nobodys_fault() -> None:
    assert parts((230, 231, 240, 250, 265, 300, 310, 320)) == [30, 10, 10, 15]


def test_what_happened_before_the_gap_costs_nothing() -> None:
    assert parts((0, 110, 120, 130, 203, 300, 310, 320)) == [0, 0, 0, 3]


def test_a_step_that_follows_at_once_has_no_gap() -> None:
    assert parts((0, 110, 120, 130, 200, 300, 310, 320)) == [0, 0, 0, 0]


def test_a_late_stamp_counts_only_within_the_gap() -> None:
    """Clocks of device and host differ by some microseconds."""
    assert parts((0, 221, 240, 270, 265, 300, 310, 320)) == [0, 40, 25, 0]


moments = st.lists(st.integers(0, 1000), min_size=8, max_size=8).map(tuple)


@given(st.lists(moments, min_size=1, max_size=20))
def test_parts_sum_to_the_gap_whatever_the_stamps(rows: list[tuple[int, ...]]) -> None:
    steps = step_log(rows)
    gaps = bubbles.gaps_of(steps)
    assert gaps.parts_ns.shape == (len(rows) - 1, len(CAUSES))
    assert (gaps.parts_ns >= 0).all()
    expected = np.maximum(steps["started_ns"][1:] - steps["finished_ns"][:-1], 0)
    assert (gaps.total_ns == expected).all()


@given(st.lists(st.integers(0, 500), min_size=2, max_size=20), st.integers(1, 2))
def test_the_host_path_of_a_synchronous_run_is_its_gap(durations: list[int], lag: int) -> None:
    """At depth 1 the five parts of the way fill the gap between two steps exactly."""
    rows, now = [], FIRST_NS
    for duration in durations:
        published = now + 3 * lag
        started = published + 2 + duration
        finished = started + duration
        taken = finished + 9
        rows.append((0, now, published, published + 2, started, finished, finished + 5, taken))
        now = taken
    steps = step_log(rows)
    gaps, path = bubbles.gaps_of(steps), bubbles.host_path(steps, 1)
    # The gap before the first step of a run belongs to the result before it.
    way = path.wake_ns[:-1] + path.take_ns[:-1] + path.build_ns
    way += path.border_ns[1:] + path.launch_ns[1:]
    assert way.tolist() == gaps.total_ns[1:].tolist()


def test_periods_are_of_steps_that_only_decode() -> None:
    steps = step_log([(0, 0, 0, 0, start, start + 5, 0, 0) for start in (10, 20, 31, 43, 56)])
    steps["token_count"][2] = 50
    assert bubbles.decode_periods_ns(steps).tolist() == [13]


def test_regular_steps_stay_near_the_median_of_their_neighbours() -> None:
    growing = np.arange(1_000, 3_000)
    assert bubbles.regular_share(growing) == 1.0
    uneven = growing.copy()
    uneven[[0, 500, 1_999]] = 2 * growing[[0, 500, 1_999]]
    assert bubbles.regular_share(uneven) == 1_997 / 2_000


def test_the_bound_of_a_regular_step_is_a_tenth_above_its_neighbours() -> None:
    period = np.full(101, 1_000)
    period[50] = 1_100
    assert bubbles.regular_share(period) == 1.0
    period[50] = 1_101
    assert bubbles.regular_share(period) == 100 / 101
    assert bubbles.regular_share(period[:100]) is None


@given(st.lists(st.integers(1, 2_000), min_size=101, max_size=160))
def test_regularity_is_that_of_the_plain_definition(durations: list[int]) -> None:
    last = len(durations) - 101
    regular = 0
    for place, duration in enumerate(durations):
        begin = min(max(place - 50, 0), last)
        others = durations[begin:place] + durations[place + 1 : begin + 101]
        regular += duration <= 1.1 * statistics.median(others)
    found = bubbles.regular_share(np.array(durations))
    assert found == regular / len(durations)
