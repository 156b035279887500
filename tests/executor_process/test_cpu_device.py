"""The CPU device's hand-overs, with a runner that stops where the test wants it to.

The runner stands in for the model alone; threads, slots, queue and wake-up are the real ones.
"""

from __future__ import annotations

import dataclasses
import select
from collections.abc import Iterator

import pytest

from gapless.executor.cpu_device import CpuDevice
from gapless.executor.device import Regions, StepError
from gapless.protos.messages import StepNumber
from gapless.protos.slots import Frame
from tests.executor_process.frames import EPOCH, int32s, one_row, regions
from tests.executor_process.latched_runner import LIMIT_S, LatchedRunner, Staged


@dataclasses.dataclass(frozen=True, slots=True)
class Rig:
    device: CpuDevice[Staged]
    runner: LatchedRunner
    regions: Regions

    def publish(self, frame: Frame) -> None:
        self.regions.frames.write(frame)
        self.device.accept(frame.step)

    def wait_begun(self) -> None:
        assert self.runner.begun.acquire(timeout=LIMIT_S)

    def wait_finished(self) -> list[int]:
        readable, _, _ = select.select([self.device.wakeup], [], [], LIMIT_S)
        assert readable
        return list(self.device.finished())

    def token(self, step: int) -> int:
        return int(self.regions.results.read(EPOCH, StepNumber(step)).tokens[0])


@pytest.fixture
def rig() -> Iterator[Rig]:
    shared, runner = regions(), LatchedRunner()
    rig = Rig(CpuDevice(EPOCH, shared, runner), runner, shared)
    yield rig
    for _ in range(8):
        runner.go.release()
    rig.device.close()


def test_the_next_frame_is_accepted_while_a_step_runs(rig: Rig) -> None:
    rig.publish(one_row(0, (10,)))
    rig.wait_begun()
    rig.publish(one_row(1, (0,), position=1, carry_row=0))
    assert rig.runner.staged == [0, 1]
    assert rig.device.in_flight == 2
    assert rig.device.finished() == ()

    rig.runner.go.release()
    assert rig.wait_finished() == [0]
    rig.wait_begun()
    # Step 1 runs; its staging slot is taken, that of step 0 is free again.
    rig.publish(one_row(2, (0,), position=2, carry_row=0))
    first = rig.regions.results.read(EPOCH, StepNumber(0))
    rig.runner.go.release(2)
    finished = rig.wait_finished()
    while len(finished) < 2:
        finished += rig.wait_finished()
    assert finished == [1, 2]
    second = rig.regions.results.read(EPOCH, StepNumber(1))
    assert second.accepted_ns < first.finished_ns <= second.started_ns, "step 1 came during step 0"
    assert first.accepted_ns <= first.started_ns
    # Each step continued what the step before had sampled.
    assert rig.token(1) == 12
    assert rig.token(2) == 13


def test_the_step_slot_is_not_read_after_acceptance(rig: Rig) -> None:
    rig.publish(one_row(0, (10,), assignments=int32s(1, 2, 3).reshape(1, 3)))
    rig.wait_begun()
    rig.publish(one_row(1, (20,), position=1, assignments=int32s(4, 5, 6).reshape(1, 3)))
    # Step 3 goes to the step slot of step 1 before that runs: nobody may do so, but it shows
    # whose memory step 1 reads.
    rig.regions.frames.write(one_row(3, (70,), assignments=int32s(7, 8, 9).reshape(1, 3)))
    rig.runner.go.release(2)
    finished = rig.wait_finished()
    while len(finished) < 2:
        finished += rig.wait_finished()
    assert rig.token(1) == 21
    assert rig.runner.assigned == [[1, 2, 3], [4, 5, 6]]


def test_a_third_step_in_flight_is_our_mistake(rig: Rig) -> None:
    rig.publish(one_row(0, (10,)))
    rig.publish(one_row(1, (20,), position=1))
    rig.regions.frames.write(one_row(2, (30,), position=2))
    with pytest.raises(AssertionError, match="third"):
        rig.device.accept(StepNumber(2))


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (one_row(0, (10,), carry_row=0), "first step"),
        (one_row(0, (10,), epoch=EPOCH + 1), "epoch|4"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_first_frame_is_refused(rig: Rig, frame: Frame, complaint: str) -> None:
    rig.regions.frames.write(frame)
    with pytest.raises(AssertionError, match=complaint):
        rig.device.accept(frame.step)


def test_a_carry_source_must_be_a_row_of_the_step_before(rig: Rig) -> None:
    rig.publish(one_row(0, (10,)))
    rig.regions.frames.write(one_row(1, (0,), position=1, carry_row=1))
    with pytest.raises(AssertionError, match=r"\(1, 1\)"):
        rig.device.accept(StepNumber(1))


def test_steps_follow_each_other(rig: Rig) -> None:
    rig.publish(one_row(5, (10,)))
    rig.regions.frames.write(one_row(8, (10,)))
    with pytest.raises(AssertionError, match="step 8 follows 5"):
        rig.device.accept(StepNumber(8))


def test_a_fault_is_raised_in_the_io_thread_behind_the_steps_before_it(rig: Rig) -> None:
    rig.runner.fail_at = 1
    rig.publish(one_row(0, (10,)))
    rig.publish(one_row(1, (20,), position=1))
    rig.runner.go.release(2)
    rig.device._thread.join(LIMIT_S)  # both have landed, so both are seen at once
    assert rig.device.finished() == (0,)
    with pytest.raises(StepError, match="RuntimeError: out of luck") as raised:
        rig.wait_finished()
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_many_steps_come_out_in_order(rig: Rig) -> None:
    step_count = 50
    rig.runner.go.release(step_count)
    finished: list[int] = []
    published = 0
    while len(finished) < step_count:
        while published < step_count and rig.device.in_flight < 2:
            rig.publish(
                one_row(published, (100,), position=published, carry_row=0 if published else -1)
            )
            published += 1
        for step in rig.wait_finished():
            assert rig.token(step) == 101 + step
            finished.append(step)
    assert finished == list(range(step_count))
