"""How gateways, scheduler and executor find each other, in every order."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from gapless.protos.messages import Finished, GatewayGoodbye, GatewayHello, ServerState
from gapless.protos.reasons import Reason
from tests.scheduler_process.players import (
    FACTS,
    REVISION,
    VOCABULARY,
    Executor,
    Gateway,
    stream_of,
)
from tests.scheduler_process.rig import Rig

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "order", list(itertools.permutations(("scheduler", "gateway", "executor"))), ids="-".join
)
def test_start_order_does_not_matter(rig: Rig, order: tuple[str, ...]) -> None:
    starts: dict[str, Callable[[], object]] = {
        "scheduler": rig.start,
        "gateway": rig.gateway,
        "executor": rig.executor,
    }
    started = {name: starts[name]() for name in order}
    gateway = started["gateway"]
    assert isinstance(gateway, Gateway)
    rig.until(lambda: bool(gateway.welcomes))
    assert gateway.states[-1] is ServerState.SERVING
    assert set(gateway.states) <= {ServerState.STARTING, ServerState.SERVING}
    welcome = gateway.welcomes[-1]
    assert welcome.facts == FACTS
    assert welcome.limits.running_max == FACTS.row_max
    handle = gateway.submit(1)
    rig.until(lambda: gateway.end(handle) is not None)
    assert isinstance(gateway.end(handle), Finished)
    assert gateway.tokens[handle] == stream_of(1, 5, 10)


def test_a_gateway_is_told_at_once_that_the_server_is_starting(rig: Rig) -> None:
    rig.start()
    gateway = rig.gateway()
    rig.until(lambda: gateway.states == [ServerState.STARTING])
    handle = gateway.submit(1)
    rig.until(lambda: gateway.end(handle) is not None)
    failed = gateway.failed(handle)
    assert failed.reason is Reason.STARTING
    assert failed.retry_after_s is not None
    assert rig.stats(gateway).state is ServerState.STARTING
    rig.executor()
    rig.until(lambda: bool(gateway.welcomes))
    assert gateway.states == [ServerState.STARTING, ServerState.SERVING]
    assert rig.stats(gateway).state is ServerState.SERVING


def test_a_gateway_of_another_model_is_not_served(rig: Rig) -> None:
    gateway, _ = rig.serve()
    other = Gateway(rig.context, rig.run_folder)
    rig.players.append(other)
    other.greet("another revision")
    rig.until(lambda: other.states == [ServerState.FAILED])
    assert "another revision" in rig.scheduler.log()
    handle = other.submit(1)
    rig.until(lambda: other.end(handle) is not None)
    assert other.failed(handle).reason is Reason.NO_EXECUTOR
    assert other.welcomes == []
    handle = gateway.submit(1)
    rig.until(lambda: gateway.end(handle) is not None)
    gateway.finished(handle)


def test_a_vocabulary_of_another_size_is_not_served(rig: Rig) -> None:
    rig.serve()
    other = Gateway(rig.context, rig.run_folder)
    rig.players.append(other)
    short = msgspec.structs.replace(VOCABULARY, special=VOCABULARY.special[1:])
    other.say(GatewayHello(REVISION, short))
    rig.until(lambda: other.states == [ServerState.FAILED])


def test_a_gateway_that_has_not_greeted_is_not_served(rig: Rig) -> None:
    rig.serve()
    other = Gateway(rig.context, rig.run_folder)
    rig.players.append(other)
    handle = other.submit(1)
    rig.until(lambda: other.end(handle) is not None)
    assert other.failed(handle).reason is Reason.NO_EXECUTOR


def test_greeting_again_changes_nothing(rig: Rig) -> None:
    gateway, executor = rig.serve()
    executor.latched = True
    handle = gateway.submit(1)
    rig.until(lambda: gateway.is_admitted(handle))
    gateway.greet()
    rig.until(lambda: len(gateway.welcomes) == 2)
    assert gateway.welcomes[0] == gateway.welcomes[1]
    executor.latched = False
    rig.until(lambda: gateway.end(handle) is not None)
    assert gateway.tokens[handle] == stream_of(1, 5, 10)


def test_a_second_executor_is_told_to_stop(rig: Rig) -> None:
    gateway, _ = rig.serve()
    second = rig.executor()
    rig.until(lambda: second.is_stopped)
    rig.disconnect(second)
    handle = gateway.submit(1)
    rig.until(lambda: gateway.end(handle) is not None)
    gateway.finished(handle)


def test_an_executor_without_room_is_told_to_stop(rig: Rig) -> None:
    rig.start()
    useless = Executor(rig.context, rig.run_folder)
    rig.players.append(useless)
    useless.greet(msgspec.structs.replace(FACTS, block_count=1))
    rig.until(lambda: useless.is_stopped)
    assert "block_count 1" in rig.scheduler.log()
    good = rig.executor()
    rig.until(lambda: good.attach is not None)


def test_a_gateway_that_says_goodbye_leaves_nothing_behind(rig: Rig) -> None:
    gateway, executor = rig.serve()
    leaving = rig.gateway()
    rig.until(lambda: bool(leaving.welcomes))
    executor.latched = True
    handle = leaving.submit(1)
    rig.until(lambda: leaving.is_admitted(handle))
    leaving.say(GatewayGoodbye())
    executor.latched = False
    rig.until_at_rest(gateway)


def test_limits_are_those_of_the_flags_cut_to_the_executor(rig: Rig) -> None:
    gateway, executor = rig.serve(
        *("--running-max", "3", "--queued-max", "7", "--queued-tokens-max", "70"),
        *("--step-tokens-max", "16"),
    )
    limits = gateway.welcomes[-1].limits
    assert (limits.running_max, limits.queued_max, limits.queued_tokens_max) == (3, 7, 70)
    assert executor.attach is not None
    assert executor.attach.token_max == 16
    assert executor.attach.seat_count == 4


def test_an_idle_gateway_hears_a_beat(rig: Rig) -> None:
    gateway, _ = rig.serve()
    rig.until(lambda: gateway.beats >= 2)
