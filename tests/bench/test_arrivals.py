"""When requests are sent: the same times for the same seed, however many processes send them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.bench.arrivals import poisson, ramp, shares
from gapless.bench.work import Request, batch


def requests(count: int) -> tuple[Request, ...]:
    return batch(count, 1, 1, 100).requests


def test_a_seed_gives_one_schedule() -> None:
    first = poisson(1000, 5.0, seed=7)
    assert first.tolist() == poisson(1000, 5.0, seed=7).tolist()
    assert first.tolist() != poisson(1000, 5.0, seed=8).tolist()
    assert first[0] == 0.0
    assert (np.diff(first) > 0).all()


def test_arrivals_are_poisson() -> None:
    gaps = np.diff(poisson(20_000, 5.0, seed=1))
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.03)  # as the exponential distribution has it


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 12))
def test_processes_divide_the_work_and_change_nothing_of_it(
    count: int, process_count: int, concurrency: int
) -> None:
    arrivals_s = poisson(count, 3.0, seed=0)
    opened = shares(requests(count), arrivals_s, None, process_count)
    sent = [time for each in opened if each.arrivals_s is not None for time in each.arrivals_s]
    assert sorted(sent) == arrivals_s.tolist()
    for share in opened:
        assert share.arrivals_s is not None
        assert len(share.requests) == len(share.arrivals_s) > 0
    starts_s = ramp(concurrency, 1.5)
    closed = shares(requests(count), None, starts_s, process_count)
    assert sum(len(each.requests) for each in closed) == count
    assert sorted(time for each in closed for time in each.starts_s) == starts_s
    assert all(each.starts_s and each.requests for each in closed)


def test_streams_of_a_closed_loop_begin_evenly() -> None:
    assert ramp(4, 2.0) == [0.0, 0.5, 1.0, 1.5]
    assert ramp(2, 0.0) == [0.0, 0.0]
