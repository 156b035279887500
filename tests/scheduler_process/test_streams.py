"""Streams through a real process: right tokens, two steps in flight, ends at any moment."""

from __future__ import annotations

import pytest

from gapless.protos.messages import Cancel, CancelById, CancelCause, FinishReason, PrefillStarted
from gapless.protos.reasons import Reason
from gapless.protos.slots import NO_CARRY
from tests.scheduler_process.players import stream_of
from tests.scheduler_process.rig import Rig

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_of_tokens(rig: Rig, depth: int) -> None:
    gateway, executor = rig.serve("--depth", str(depth))
    handle = gateway.submit(3, prompt_tokens=7, max_new_tokens=20)
    rig.until(lambda: gateway.end(handle) is not None)
    assert gateway.tokens[handle] == stream_of(3, 7, 20)
    finished = gateway.finished(handle)
    assert finished.reason is FinishReason.MAX_NEW_TOKENS
    assert finished.completion_tokens == 20
    assert [type(event) for event in gateway.events[handle]].count(PrefillStarted) == 1
    carried = any((frame.rows.carry_row != NO_CARRY).any() for frame in executor.accepted)
    assert carried == (depth == 2)
    stats = rig.until_at_rest(gateway)
    assert (stats.requests_total, stats.generated_tokens_total) == (1, 20)
    assert stats.steps_total == len(executor.accepted)


@pytest.mark.parametrize("depth", [1, 2])
def test_many_streams_share_steps(rig: Rig, depth: int) -> None:
    gateway, executor = rig.serve("--depth", str(depth))
    handles = [gateway.submit(k, prompt_tokens=1 + 5 * k, max_new_tokens=30 - k) for k in range(20)]
    rig.until(lambda: all(gateway.end(handle) for handle in handles))
    for k, handle in enumerate(handles):
        assert gateway.tokens[handle] == stream_of(k, 1 + 5 * k, 30 - k), k
    assert max(frame.row_count for frame in executor.accepted) > 1
    rig.until_at_rest(gateway)


@pytest.mark.parametrize("depth", [1, 2])
def test_as_many_steps_are_in_flight_as_the_depth(rig: Rig, depth: int) -> None:
    """The executor holds step N, and receives N+1 (depth 2) or nothing more (depth 1)."""
    gateway, executor = rig.serve("--depth", str(depth))
    executor.latched = True
    handle = gateway.submit(1)
    rig.until(lambda: len(executor.accepted) == depth)
    rig.stats(gateway)
    rig.stats(gateway)
    assert len(executor.accepted) == depth, "the fence holds"
    assert gateway.tokens == {}
    executor.finish_one()
    rig.until(lambda: len(executor.accepted) == depth + 1)
    executor.latched = False
    rig.until(lambda: gateway.end(handle) is not None)
    assert gateway.tokens[handle] == stream_of(1, 5, 10)


def test_the_next_frame_leaves_before_the_tokens_are_told(rig: Rig) -> None:
    """With the gateway's words unread, the pipeline goes on to the last token."""
    gateway, executor = rig.serve()
    rig.players.remove(gateway)
    handle = gateway.submit(1, max_new_tokens=50)
    rig.until(lambda: len(executor.accepted) >= 50)
    rig.players.append(gateway)
    rig.until(lambda: gateway.end(handle) is not None)
    assert gateway.tokens[handle] == stream_of(1, 5, 50)


def test_cancel_is_answered_while_the_executor_computes(rig: Rig) -> None:
    gateway, executor = rig.serve()
    executor.latched = True
    cancelled, kept = gateway.submit(1), gateway.submit(2)
    rig.until(lambda: len(executor.accepted) == 2)
    gateway.say(Cancel((cancelled, cancelled), CancelCause.CLIENT))
    rig.until(lambda: gateway.end(cancelled) is not None)
    assert gateway.finished(cancelled).reason is FinishReason.CANCELLED
    assert len(executor.waiting) == 2, "nothing was computed meanwhile"
    executor.latched = False
    rig.until(lambda: gateway.end(kept) is not None)
    assert gateway.tokens[kept] == stream_of(2, 5, 10)
    rig.until_at_rest(gateway)


def test_cancel_by_id_reaches_every_gateway(rig: Rig) -> None:
    gateway, executor = rig.serve()
    other = rig.gateway()
    rig.until(lambda: bool(other.welcomes))
    executor.latched = True
    handle = other.submit(1)
    rig.until(lambda: other.is_admitted(handle))
    gateway.say(CancelById(5, "", ("request-9", "request-1")))
    rig.until(lambda: bool(gateway.cancelled) and other.end(handle) is not None)
    assert gateway.cancelled[0].call == 5
    assert gateway.cancelled[0].request_ids == ("request-1",)
    assert other.finished(handle).reason is FinishReason.CANCELLED


def test_two_gateways_get_their_own_tokens_only(rig: Rig) -> None:
    first, _ = rig.serve()
    second = rig.gateway()
    rig.until(lambda: bool(second.welcomes))
    firsts = [first.submit(2 * k, max_new_tokens=20) for k in range(6)]
    seconds = [second.submit(2 * k + 1, max_new_tokens=20) for k in range(6)]
    shared = first.submit(99), second.submit(99, prompt_tokens=9, request_id="another")
    rig.until(
        lambda: (
            all(first.end(handle) for handle in (*firsts, shared[0]))
            and all(second.end(handle) for handle in (*seconds, shared[1]))
        )
    )
    assert set(first.tokens) == {*firsts, shared[0]}
    assert set(second.tokens) == {*seconds, shared[1]}
    for gateway, handles in ((first, firsts), (second, seconds)):
        for handle in handles:
            assert gateway.tokens[handle] == stream_of(handle, 5, 20)
    assert first.tokens[shared[0]] == stream_of(99, 5, 10)
    assert second.tokens[shared[1]] == stream_of(99, 9, 10)


def test_stop_strings_end_a_stream(rig: Rig) -> None:
    gateway, _ = rig.serve()
    expected = stream_of(1, 5, 40)
    text = bytes(ord("a") + token for token in expected)
    handle = gateway.submit(1, max_new_tokens=40, stop_strings=(b"\n", text[7:10]))
    rig.until(lambda: gateway.end(handle) is not None)
    finished = gateway.finished(handle)
    assert finished.reason is FinishReason.STOP_STRING
    assert finished.stop_string_index == 1
    assert gateway.tokens[handle] == expected[: text.index(text[7:10]) + 3]


def test_a_gateway_that_dies_frees_everything(rig: Rig) -> None:
    gateway, executor = rig.serve("--running-max", "4")
    dying = rig.gateway()
    rig.until(lambda: bool(dying.welcomes))
    executor.latched = True
    handles = [dying.submit(k) for k in range(10)]
    kept = gateway.submit(50)
    rig.until(lambda: all(dying.is_admitted(h) for h in handles) and gateway.is_admitted(kept))
    stats = rig.stats(gateway)
    assert stats.running_requests + stats.queued_requests == 11
    rig.disconnect(dying)
    while stats.running_requests + stats.queued_requests > 1:
        stats = rig.stats(gateway)
    executor.latched = False
    rig.until(lambda: gateway.end(kept) is not None)
    assert gateway.tokens[kept] == stream_of(50, 5, 10)
    rig.until_at_rest(gateway)


def test_a_full_queue_refuses(rig: Rig) -> None:
    gateway, executor = rig.serve("--running-max", "1", "--queued-max", "2")
    executor.latched = True
    first = gateway.submit(0)
    rig.until(lambda: len(executor.accepted) == 2)
    handles = [gateway.submit(k) for k in range(1, 6)]
    rig.until(lambda: gateway.end(handles[-1]) is not None)
    refused = [handle for handle in handles if gateway.end(handle) is not None]
    assert refused == handles[2:]
    assert {gateway.failed(handle).reason for handle in refused} == {Reason.QUEUE_FULL}
    executor.latched = False
    rig.until(lambda: all(gateway.end(handle) for handle in (first, *handles)))
    for handle in (first, *handles[:2]):
        assert gateway.tokens[handle] == stream_of(handle, 5, 10)
    assert rig.until_at_rest(gateway).requests_rejected_total == 3


def test_time_ends_what_waits_and_what_runs(rig: Rig) -> None:
    """Nothing else happens meanwhile: the loop wakes up for it."""
    gateway, executor = rig.serve("--running-max", "1")
    executor.latched = True
    running = gateway.submit(0, deadline_in_s=0.3)
    waiting = gateway.submit(1, queue_timeout_s=0.1)
    rig.until(lambda: gateway.end(running) is not None and gateway.end(waiting) is not None)
    assert gateway.failed(waiting).reason is Reason.QUEUE_TIMEOUT
    assert gateway.failed(running).reason is Reason.DEADLINE
    executor.latched = False
    rig.until_at_rest(gateway)


def test_each_request_has_one_log_line_without_its_text(rig: Rig) -> None:
    gateway, _ = rig.serve()
    handle = gateway.submit(1)
    rig.until(lambda: gateway.end(handle) is not None)
    rig.stats(gateway)
    lines = [line for line in rig.scheduler.log().splitlines() if '"request-1"' in line]
    assert len(lines) == 1
    for part in ('"reason": "MAX_NEW_TOKENS"', '"completion_tokens": 10', '"prompt_tokens": 5'):
        assert part in lines[0]
