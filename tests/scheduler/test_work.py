"""How long the device worked, as latencies and the histogram of steps see it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from gapless.protos.bubbles import STEP_BOUNDS_US
from gapless.protos.messages import Epoch, Finished
from gapless.protos.slots import Frame
from gapless.scheduler.core import Core
from tests.scheduler.words import GATEWAY, config, events_of, result_of, submit

SECOND = 10**9
DRIFT = 5 * SECOND


def run_step(core: Core, started_s: float, finished_s: float, behind_ns: int = 0) -> None:
    """Builds a step and takes its result, whose clock may be behind."""
    frame = core.build(started_s)
    assert frame is not None
    take(core, frame, started_s, finished_s, behind_ns)


def take(core: Core, frame: Frame, started_s: float, finished_s: float, behind_ns: int) -> None:
    result = dataclasses.replace(
        result_of(frame),
        started_ns=int(started_s * SECOND) - behind_ns,
        finished_ns=int(finished_s * SECOND) - behind_ns,
    )
    core.result(finished_s, result, behind_ns)


def device_s(core: Core) -> list[float]:
    return [
        event.timing.device_s
        for event in events_of(core.take_updates())
        if isinstance(event, Finished)
    ]


@pytest.mark.parametrize("behind_ns", [0, DRIFT, -DRIFT])
def test_only_work_after_the_arrival_and_before_the_first_token_counts(behind_ns: int) -> None:
    core = Core(config(depth=1), Epoch(1))
    core.submit(0.0, GATEWAY, submit(1, max_new_tokens=4))
    run_step(core, 1.0, 2.0, behind_ns)  # its prefill: the whole step, not the wait before it
    frame = core.build(2.0)
    assert frame is not None
    core.submit(5.0, GATEWAY, submit(2, max_new_tokens=2))  # in the midst of the step
    take(core, frame, 3.0, 7.0, behind_ns)
    run_step(core, 9.0, 9.5, behind_ns)  # its prefill, after a gap of 2 s
    run_step(core, 9.5, 20.0, behind_ns)  # what comes after the first token does not count
    assert device_s(core) == [1.0, 2.0 + 0.5]


def test_a_sequence_that_never_ran_has_none() -> None:
    core = Core(config(), Epoch(1))
    core.submit(0.0, GATEWAY, submit(1))
    core.gateway_gone(1.0, GATEWAY)
    core.submit(2.0, GATEWAY, submit(2, time_limit_s=1.0))
    core.tick(3.0)
    assert device_s(core) == [0.0]


def test_steps_are_counted_once_a_token_by_their_length() -> None:
    core = Core(config(depth=1), Epoch(1))
    core.submit(0.0, GATEWAY, submit(1, max_new_tokens=3))
    core.submit(0.0, GATEWAY, submit(2, max_new_tokens=2))
    run_step(core, 0.0, 0.5)  # two first tokens, which come after no other
    run_step(core, 1.0, 1.0001)  # two in the shortest bucket
    run_step(core, 2.0, 10.0)  # one in the last, which has no bound
    counts = core.stats(10.0).step_counts
    assert (counts[0], counts[-1], sum(counts)) == (2, 1, 3)
    assert len(counts) == len(STEP_BOUNDS_US) + 1


def test_bounds_go_up_by_less_than_five_percent() -> None:
    pairs = itertools.pairwise(STEP_BOUNDS_US)
    assert all(low < high < 1.05 * low for low, high in pairs)
