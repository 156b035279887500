"""The loop of the I/O thread, while the compute thread is held in a step.

Link, device, sockets and regions are the real ones, in one process; the runner waits for the test.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless.executor.cpu_device import CpuDevice
from gapless.executor.device import Device, Regions
from gapless.executor.link import Ending, Link
from gapless.executor.signals import Signals
from gapless.protos.messages import (
    Attach,
    ExecutorFault,
    ModelFacts,
    StepDone,
    StepNumber,
    StepReady,
    Stop,
)
from tests.executor_process.fake_scheduler import FakeScheduler, fake_scheduler
from tests.executor_process.frames import ATTACH, EPOCH, one_row
from tests.executor_process.latched_runner import LIMIT_S, LatchedRunner, Staged

FACTS = ModelFacts(
    revision="0",
    vocab_size=256,
    context_length=64,
    block_tokens=16,
    block_count=17,
    row_max=ATTACH.row_max,
    token_max=ATTACH.token_max,
    device="cpu",
    dtype="float32",
)


@pytest.fixture
def signals() -> Iterator[Signals]:
    """Real signal handlers, put back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    counting = Signals()
    counting.serve()
    yield counting
    signal.set_wakeup_fd(-1)
    for number, previous in before.items():
        signal.signal(number, previous)


@dataclasses.dataclass(slots=True)
class Rig:
    scheduler: FakeScheduler
    runner: LatchedRunner
    announced: threading.Event
    endings: list[Ending]
    thread: threading.Thread

    def ending(self) -> Ending:
        self.thread.join(LIMIT_S)
        (ending,) = self.endings
        return ending


class RestlessDevice(CpuDevice[Staged]):
    """Lets nobody sleep while a step is in flight."""

    def may_sleep(self) -> bool:
        return self.in_flight == 0


@pytest.fixture(params=[CpuDevice, RestlessDevice])
def rig(tmp_path: Path, signals: Signals, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """An attached link, its loop in a thread of its own."""
    runner, announced, endings = LatchedRunner(), threading.Event(), list[Ending]()

    def start_device(attach: Attach, regions: Regions) -> Device:
        device: Device = request.param(attach.epoch, regions, runner)
        return device

    def serve() -> None:
        link = Link(tmp_path, signals, FACTS, start_device, announced.set)
        endings.append(link.run())
        link.close()

    with fake_scheduler(tmp_path, ATTACH) as scheduler:
        thread = threading.Thread(target=serve)
        thread.start()
        scheduler.attach()
        yield Rig(scheduler, runner, announced, endings, thread)
        runner.go.release(8)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def held_in_step_0(rig: Rig) -> None:
    """Step 0 runs and stays; frame 1 has been published and accepted meanwhile."""
    rig.scheduler.publish(one_row(0, (10,)))
    assert rig.runner.begun.acquire(timeout=LIMIT_S)
    rig.scheduler.publish(one_row(1, (0,), position=1, carry_row=0))
    for _ in range(2):
        assert rig.runner.accepted.acquire(timeout=LIMIT_S)
    assert rig.runner.staged == [0, 1]


def test_a_frame_and_words_are_taken_while_a_step_runs(rig: Rig) -> None:
    assert rig.announced.wait(LIMIT_S)
    held_in_step_0(rig)
    rig.scheduler.send(Stop())
    # A step behind Stop is a mistake of the scheduler's: that the link complains about this one
    # proves that it has heard both words, and step 0 is still held.
    rig.scheduler.send(StepReady(EPOCH, StepNumber(2)))
    assert rig.scheduler.receive() == ExecutorFault(EPOCH, "AssertionError: step 2 behind Stop")
    assert not rig.runner.begun.acquire(blocking=False), "step 1 waits for step 0"
    assert rig.ending() is Ending.BROKEN


def test_a_result_is_told_while_the_next_step_runs(rig: Rig) -> None:
    held_in_step_0(rig)
    rig.runner.go.release()
    assert rig.scheduler.receive() == StepDone(EPOCH, StepNumber(0))
    assert rig.runner.begun.acquire(timeout=LIMIT_S)  # step 1, held in its turn
    rig.scheduler.publish(one_row(2, (0,), position=2, carry_row=0))
    assert rig.runner.accepted.acquire(timeout=LIMIT_S)
    rig.scheduler.send(Stop())
    rig.runner.go.release(2)
    results = []
    for _ in range(2):
        result = rig.scheduler.result()
        results.append((result.step, int(result.tokens[0])))
    assert results == [(1, 12), (2, 13)]
    assert rig.ending() is Ending.DONE


def test_words_of_another_epoch_are_our_mistake(rig: Rig) -> None:
    other = EPOCH + 1
    rig.scheduler.send(StepReady(other, StepNumber(0)))  # type: ignore[arg-type]
    fault = rig.scheduler.receive()
    assert fault == ExecutorFault(EPOCH, "AssertionError: step 0 of epoch 4, not 3")
    assert rig.ending() is Ending.BROKEN


def test_a_lost_scheduler_ends_the_loop_while_a_step_runs(rig: Rig) -> None:
    held_in_step_0(rig)
    rig.scheduler.close()
    assert rig.ending() is Ending.SCHEDULER_LOST


def test_a_second_signal_ends_the_loop_while_a_step_runs(rig: Rig) -> None:
    held_in_step_0(rig)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert rig.ending() is Ending.FORCED
