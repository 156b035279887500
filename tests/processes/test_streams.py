"""Many streams at once through real processes: right text, and nothing left behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from gapless.protos.inference_pb2 import CancelGenerateRequest
from tests.processes.calls import (
    CALL_LIMIT_S,
    Gateway,
    Reply,
    at_rest,
    collect,
    connect,
    generate,
    generate_all,
    request_of,
    start_streams,
    statistics_when,
)
from tests.processes.reference import Continuation, Reference
from tests.processes.server import Server

pytestmark = pytest.mark.processes

STREAM_COUNT = 200
NEW_TOKENS = 24
LONG_TOKENS = 120
CANCELLED_TOKENS = 560
"""More than can be done before a cancel arrives."""
PROMPT_LENGTHS = (3, 17, 32, 45)
"""Within a block, over its border, exactly two, and longer than a prefill chunk."""
GAP_MIN = 1e-3
FREED_WITHIN_S = 1.0

Expected = list[tuple[list[int], Continuation]]


@pytest.fixture(scope="module")
def expected(tiny_reference: Reference) -> Expected:
    """Prompts of mixed lengths whose greedy choices are all clear, with their continuations."""
    draw = random.Random(5)
    columns: list[Expected] = []
    for length in PROMPT_LENGTHS:
        prompts = [
            [draw.randrange(3, tiny_reference.vocab_size) for _ in range(length)]
            for _ in range(STREAM_COUNT // 2)
        ]
        continuations = tiny_reference.continuations(prompts, NEW_TOKENS)
        clear = [
            pair for pair in zip(prompts, continuations, strict=True) if pair[1].gap >= GAP_MIN
        ]
        columns.append(clear[: STREAM_COUNT // len(PROMPT_LENGTHS)])
    mixed = [pair for row in zip(*columns, strict=True) for pair in row]
    assert len(mixed) == STREAM_COUNT
    return mixed


def check(reply: Reply, continuation: Continuation, reference: Reference) -> None:
    reply.check()
    assert reply.token_ids == continuation.token_ids
    assert reply.text == reference.text(continuation.token_ids)
    assert reply.finish == "MAX_NEW_TOKENS"


def test_one_at_a_time_equals_the_reference(
    tiny_server: Server, tiny_reference: Reference, expected: Expected
) -> None:
    async def scenario() -> None:
        async with connect(tiny_server.address, tiny_server.admin_address) as gateway:
            for prompt, continuation in expected[:12]:
                reply = await generate(gateway, request_of(prompt, NEW_TOKENS))
                check(reply, continuation, tiny_reference)

    asyncio.run(scenario())


def test_two_hundred_streams_at_once_all_give_the_right_text(
    tiny_server: Server, tiny_reference: Reference, expected: Expected
) -> None:
    """More than can run, with fewer blocks than the running ones need: queued and preempted."""

    async def scenario() -> list[Reply]:
        requests = [request_of(prompt, NEW_TOKENS) for prompt, _ in expected]
        halves = requests[0::2], requests[1::2]
        async with (
            connect(tiny_server.addresses[0], tiny_server.admin_addresses[0]) as first,
            connect(tiny_server.addresses[1], tiny_server.admin_addresses[1]) as second,
        ):
            replies = await asyncio.gather(
                *(
                    generate_all(gateway, half)
                    for gateway, half in zip((first, second), halves, strict=True)
                )
            )
            statistics = await statistics_when(first, at_rest)
            assert statistics.preemptions_total > 0, "the pool is too large for this test"
        return [reply for pair in zip(*replies, strict=True) for reply in pair]

    for reply, (_, continuation) in zip(asyncio.run(scenario()), expected, strict=True):
        check(reply, continuation, tiny_reference)


def test_closing_half_of_the_streams_frees_what_they_held(
    tiny_server: Server, tiny_reference: Reference, expected: Expected
) -> None:
    async def scenario() -> list[Reply]:
        async with connect(tiny_server.address, tiny_server.admin_address) as gateway:
            return await close_half(gateway)

    async def close_half(gateway: Gateway) -> list[Reply]:
        rest = await statistics_when(gateway, at_rest)
        flowing = asyncio.Event()
        calls = [
            gateway.inference.Generate(request_of(prompt, LONG_TOKENS), timeout=CALL_LIMIT_S)
            for prompt, _ in expected
        ]
        readers = [asyncio.create_task(collect(call, flowing)) for call in calls]
        await flowing.wait()
        before = await statistics_when(
            gateway, lambda now: now.requests_total == rest.requests_total + STREAM_COUNT
        )
        assert before.running_requests > 0
        assert before.queued_requests > STREAM_COUNT // 2
        for call in calls[::2]:
            call.cancel()
        half = STREAM_COUNT // 2
        freed = await statistics_when(
            gateway,
            lambda now: (
                now.open_streams <= half and now.running_requests + now.queued_requests <= half
            ),
        )
        elapsed_s = (freed.time.ToNanoseconds() - before.time.ToNanoseconds()) / 1e9
        assert elapsed_s <= FREED_WITHIN_S
        closed = await asyncio.gather(*readers[::2], return_exceptions=True)
        assert any(isinstance(outcome, asyncio.CancelledError) for outcome in closed)
        kept = await asyncio.gather(*readers[1::2])
        await statistics_when(gateway, at_rest)
        return kept

    for reply, (_, continuation) in zip(asyncio.run(scenario()), expected[1::2], strict=True):
        reply.check()
        assert len(reply.token_ids) == LONG_TOKENS
        assert reply.token_ids[:NEW_TOKENS] == continuation.token_ids
        assert reply.text == tiny_reference.text(reply.token_ids)


def test_a_cancel_by_id_reaches_a_stream_of_another_gateway(
    tiny_server: Server, tiny_reference: Reference, expected: Expected
) -> None:
    prompt, continuation = expected[0]

    async def scenario() -> None:
        async with (
            connect(tiny_server.addresses[0], tiny_server.admin_addresses[0]) as first,
            connect(tiny_server.addresses[1], tiny_server.admin_addresses[1]) as second,
        ):
            readers = await start_streams(
                first,
                (
                    request_of(prompt, CANCELLED_TOKENS, request_id=f"cancel:{index}")
                    for index in range(2)
                ),
            )
            ids = ["cancel:1", "no-such-id", "cancel:0"]
            answer = await second.inference.CancelGenerate(
                CancelGenerateRequest(request_ids=ids), timeout=CALL_LIMIT_S
            )
            assert list(answer.cancelled_request_ids) == ["cancel:1", "cancel:0"]
            for reply in await asyncio.gather(*readers):
                reply.check()
                assert reply.finish == "CANCELLED"
                assert 0 < len(reply.token_ids) < CANCELLED_TOKENS
                assert (
                    reply.token_ids[:NEW_TOKENS] == continuation.token_ids[: len(reply.token_ids)]
                )
                assert reply.text == tiny_reference.text(reply.token_ids)
            again = await second.inference.CancelGenerate(
                CancelGenerateRequest(request_ids=ids), timeout=CALL_LIMIT_S
            )
            assert list(again.cancelled_request_ids) == []
            await statistics_when(first, at_rest)

    asyncio.run(scenario())
