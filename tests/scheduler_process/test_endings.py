"""How a scheduler ends: lost executor, drain, force, and our own mistakes."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from gapless.protos.messages import (
    Epoch,
    ExecutorFault,
    FinishReason,
    Handle,
    ServerState,
    StepNumber,
)
from gapless.protos.reasons import Reason
from tests.scheduler_process.players import Executor, Gateway, stream_of
from tests.scheduler_process.rig import Rig

pytestmark = pytest.mark.processes


def running(rig: Rig, *flags: str, count: int = 3) -> tuple[Gateway, Executor, list[Handle]]:
    """A server whose executor is latched, with `count` admitted requests of 10 tokens."""
    gateway, executor = rig.serve(*flags)
    executor.latched = True
    handles = [gateway.submit(k) for k in range(count)]
    rig.until(lambda: all(gateway.is_admitted(h) for h in handles) and len(executor.accepted) == 2)
    return gateway, executor, handles


def all_ended(gateway: Gateway, handles: list[Handle]) -> Callable[[], bool]:
    return lambda: all(gateway.end(handle) is not None for handle in handles)


def assert_all_failed(gateway: Gateway, handles: list[Handle], reason: Reason) -> None:
    assert {gateway.failed(handle).reason for handle in gateway.events} == {reason}
    assert set(gateway.events) == set(handles)


def left_behind(rig: Rig) -> list[str]:
    return sorted(path.name for path in rig.run_folder.iterdir())


@pytest.mark.parametrize("idle", [False, True])
def test_a_lost_executor_fails_its_requests_and_ends_the_process(rig: Rig, idle: bool) -> None:
    gateway, executor, handles = running(rig, count=3)
    if idle:
        executor.latched = False
        rig.until_at_rest(gateway)
    rig.disconnect(executor)
    assert rig.until_ended(lambda: gateway.states[-1] is ServerState.FAILED) == 3
    if idle:
        assert all(gateway.finished(handle) for handle in gateway.events)
    else:
        assert_all_failed(gateway, handles, Reason.EXECUTOR_LOST)
    assert "the executor is gone" in rig.scheduler.log()
    assert left_behind(rig) == []


def test_an_executor_that_breaks_is_lost_and_its_words_are_logged(rig: Rig) -> None:
    gateway, executor, handles = running(rig)
    assert executor.attach is not None
    executor.say(ExecutorFault(executor.attach.epoch, "an illegal address"))
    assert rig.until_ended(all_ended(gateway, handles)) == 3
    assert_all_failed(gateway, handles, Reason.EXECUTOR_LOST)
    assert "an illegal address" in rig.scheduler.log()


def test_an_executor_lost_before_it_was_ready_ends_the_process(rig: Rig) -> None:
    rig.start()
    executor = rig.executor()
    rig.until(lambda: executor.attach is not None)
    rig.disconnect(executor)
    assert rig.until_ended() == 3


def test_words_of_an_older_epoch_are_dropped(rig: Rig) -> None:
    gateway, executor, handles = running(rig, count=1)
    executor.say(ExecutorFault(Epoch(77), "not of now"))
    executor.latched = False
    rig.until(lambda: gateway.end(handles[0]) is not None)
    assert gateway.tokens[handles[0]] == stream_of(0, 5, 10)


def test_a_drain_lets_running_requests_finish(rig: Rig) -> None:
    gateway, executor, handles = running(rig, "--running-max", "2")
    rig.scheduler.send(signal.SIGTERM)
    rig.until(lambda: gateway.states[-1] is ServerState.DRAINING)
    assert rig.stats(gateway).state is ServerState.DRAINING
    late = gateway.submit(9)
    rig.until(lambda: gateway.end(late) is not None)
    assert gateway.failed(late).reason is Reason.DRAINING
    newcomer = rig.gateway()
    rig.until(lambda: bool(newcomer.welcomes))
    assert newcomer.states == [ServerState.DRAINING]
    executor.latched = False
    assert rig.until_ended(all_ended(gateway, handles)) == 0
    for k, handle in enumerate(handles):
        assert gateway.finished(handle).reason is FinishReason.MAX_NEW_TOKENS
        assert gateway.tokens[handle] == stream_of(k, 5, 10)
    assert left_behind(rig) == []


def test_the_end_of_the_drain_period_cancels(rig: Rig) -> None:
    gateway, _, handles = running(rig, "--drain-timeout-s", "0.1")
    rig.scheduler.send(signal.SIGTERM)
    assert rig.until_ended(all_ended(gateway, handles)) == 0
    for handle in handles:
        assert gateway.finished(handle).reason is FinishReason.CANCELLED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_at_once(rig: Rig, number: signal.Signals) -> None:
    _, executor = rig.serve("--drain-timeout-s", "100000")
    rig.scheduler.send(number)
    assert rig.until_ended(lambda: executor.is_stopped) == 0


def test_a_signal_ends_a_server_that_never_served(rig: Rig) -> None:
    rig.start()
    rig.scheduler.send(signal.SIGTERM)
    assert rig.until_ended() == 0
    assert left_behind(rig) == []


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_forces(rig: Rig, second: signal.Signals) -> None:
    gateway, _, handles = running(rig, "--drain-timeout-s", "100000")
    rig.scheduler.send(signal.SIGTERM)
    rig.until(lambda: gateway.states[-1] is ServerState.DRAINING)
    rig.scheduler.send(second)
    assert rig.until_ended(all_ended(gateway, handles)) == 130
    assert_all_failed(gateway, handles, Reason.SCHEDULER_LOST)
    assert left_behind(rig) == []


def test_a_broken_promise_of_ours_is_a_bug_and_everyone_is_told(rig: Rig) -> None:
    """A result that is not that of the step it claims trips an assertion in the loop."""
    gateway, executor, handles = running(rig)
    executor.finish_one(as_step=StepNumber(executor.waiting[0].step + 2))
    assert rig.until_ended(all_ended(gateway, handles)) == 4
    assert_all_failed(gateway, handles, Reason.ENGINE_ERROR)
    assert "the scheduler broke" in rig.scheduler.log()
    assert "AssertionError" in rig.scheduler.log()
    assert left_behind(rig) == []


def test_regions_of_a_killed_scheduler_are_replaced_under_a_new_epoch(rig: Rig) -> None:
    _, executor = rig.serve()
    assert executor.attach is not None
    rig.scheduler.process.kill()
    rig.scheduler.wait()
    assert any(name.startswith("frames") for name in left_behind(rig))
    for player in list(rig.players):
        rig.disconnect(player)
    gateway, second = rig.serve()
    assert second.attach is not None
    assert second.attach.epoch > executor.attach.epoch
    handle = gateway.submit(1)
    rig.until(lambda: gateway.end(handle) is not None)
    assert gateway.tokens[handle] == stream_of(1, 5, 10)


def test_a_run_folder_has_one_scheduler(rig: Rig) -> None:
    gateway, _ = rig.serve()
    second = rig.launch()
    assert second.wait() == 1
    assert "another scheduler uses it" in second.log()
    rig.schedulers.remove(second)
    second.close()
    handle = gateway.submit(1)
    rig.until(lambda: gateway.end(handle) is not None)
    assert gateway.tokens[handle] == stream_of(1, 5, 10)
