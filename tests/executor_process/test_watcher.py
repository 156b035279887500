"""Who notices that a step has ended, with events that a test lets come."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from gapless.executor.device import StepError
from gapless.executor.watcher import Watcher
from gapless.protos.messages import StepNumber
from gapless.protos.wakeful import CORES_MIN, SHORT_STEP_NS
from tests.executor_process.latched_runner import LIMIT_S

STEP = StepNumber(5)


class Event:
    """Has come for those who ask and for those who wait, each when the test says so."""

    def __init__(self) -> None:
        self.has_come = False
        self.go = threading.Event()
        self.fault: RuntimeError | None = None

    def query(self) -> bool:
        if self.fault is not None:
            raise self.fault
        return self.has_come

    def synchronize(self) -> None:
        assert self.go.wait(LIMIT_S)
        if self.fault is not None:
            raise self.fault


class Rig:
    """A watcher on many cores, a clock that stands, and one event."""

    def __init__(self) -> None:
        self.now_ns = 100
        self.watcher = Watcher(CORES_MIN, lambda: self.now_ns)
        self.event = Event()

    def may_sleep(self) -> bool:
        return self.watcher.may_sleep(STEP, self.event)

    def is_told(self, limit_s: float = LIMIT_S) -> bool:
        return bool(select.select([self.watcher.wakeup], [], [], limit_s)[0])


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.event.go.set()
    rig.watcher.close()


def test_an_event_that_is_handed_over_wakes(rig: Rig) -> None:
    assert rig.may_sleep()
    assert not rig.watcher.has(rig.event)
    assert rig.may_sleep(), "asked again, and handed over once"
    rig.event.has_come = True
    assert not rig.watcher.has(rig.event), "nobody asks what the watcher waits for"
    assert not rig.is_told(0.0)
    rig.event.go.set()
    assert rig.is_told()
    assert rig.watcher.has(rig.event)
    assert not rig.is_told(0.0), "told once"


def test_behind_a_short_step_the_event_is_asked(rig: Rig) -> None:
    rig.watcher.step_ended(SHORT_STEP_NS - 1)
    assert not rig.may_sleep()
    assert not rig.watcher.has(rig.event)
    rig.event.has_come = True
    assert rig.watcher.has(rig.event)
    assert not rig.is_told(0.0)


def test_a_step_that_is_late_is_handed_over(rig: Rig) -> None:
    rig.watcher.step_ended(0)
    rig.now_ns += SHORT_STEP_NS - 1
    assert not rig.may_sleep()
    rig.now_ns += 1
    assert rig.may_sleep()
    rig.event.has_come = True
    rig.event.go.set()
    assert rig.is_told()
    assert rig.watcher.has(rig.event)


def test_behind_a_long_step_one_may_sleep(rig: Rig) -> None:
    rig.watcher.step_ended(0)
    rig.watcher.step_ended(SHORT_STEP_NS)
    assert rig.may_sleep()


def test_a_fault_is_raised_to_who_asks(rig: Rig) -> None:
    rig.event.fault = RuntimeError("illegal address")
    with pytest.raises(StepError, match="RuntimeError: illegal address"):
        rig.watcher.has(rig.event)


def test_a_fault_that_the_watcher_meets_wakes(rig: Rig) -> None:
    assert rig.may_sleep()
    rig.event.fault = RuntimeError("illegal address")
    rig.event.go.set()
    assert rig.is_told()
    with pytest.raises(StepError, match="RuntimeError: illegal address"):
        rig.watcher.has(rig.event)
