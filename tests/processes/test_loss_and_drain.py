"""Ends of processes under running requests: drained ones finish, killed ones are told of.

Each test ends processes and so has a server of its own.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gapless.protos import inference_pb2
from tests.processes.calls import (
    CALL_LIMIT_S,
    Gateway,
    Reply,
    connect,
    generate,
    request_of,
    start_streams,
    statistics_when,
)
from tests.processes.plans import tiny_plan
from tests.processes.reference import Reference
from tests.processes.server import SERVICE_NAME, Child, Server, serve

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

LONG_TOKENS = 600
STREAM_COUNT = 6
BLOCK_COUNT = 300
PROMPT = list(range(5, 25))
LOST_EXIT_CODE = 3
FORCED_EXIT_CODE = 130
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def long_requests(count: int) -> list[inference_pb2.GenerateRequest]:
    return [request_of(PROMPT, LONG_TOKENS) for _ in range(count)]


@asynccontextmanager
async def draining(
    server: Server, gateway_index: int, child: Child
) -> AsyncIterator[tuple[Gateway, list[asyncio.Task[Reply]]]]:
    """Streams of a gateway that run while `child` has been asked to end, which health shows."""
    address = server.addresses[gateway_index]
    async with (
        connect(address, server.admin_addresses[gateway_index]) as gateway,
        grpc.aio.insecure_channel(address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=CALL_LIMIT_S
        )
        assert (await health.read()).status == SERVING
        readers = await start_streams(gateway, long_requests(STREAM_COUNT))
        child.signal(signal.SIGTERM)
        assert (await health.read()).status == NOT_SERVING
        assert not any(reader.done() for reader in readers)
        yield gateway, readers
        health.cancel()


async def drain(server: Server, gateway_index: int, child: Child, reference: Reference) -> None:
    """Lets `child` end in its own time: it admits nothing and delivers every last token."""
    async with draining(server, gateway_index, child) as (gateway, readers):
        refused = await generate(gateway, request_of(PROMPT, 1))
        assert (refused.code, refused.reason) == ("UNAVAILABLE", "DRAINING")
        replies = await asyncio.gather(*readers)
    for reply in replies:
        reply.check()
        assert reply.finish == "MAX_NEW_TOKENS"
        assert len(reply.token_ids) == LONG_TOKENS
        assert reply.text == reference.text(reply.token_ids)
    assert child.wait() == 0


async def force(server: Server, gateway_index: int, child: Child) -> None:
    """Has no patience with `child`: a second signal, and it ends at once."""
    async with draining(server, gateway_index, child) as (_, readers):
        child.signal(signal.SIGTERM)
        replies = await asyncio.gather(*readers)
    for reply in replies:
        assert reply.code == "UNAVAILABLE", reply.failure
        assert len(reply.token_ids) < LONG_TOKENS
    assert child.wait() == FORCED_EXIT_CODE


def test_a_drain_delivers_every_last_token(tiny_folder: Path, tiny_reference: Reference) -> None:
    """First one gateway of two, while the other goes on; then the scheduler."""
    with serve(tiny_plan(tiny_folder, 2, BLOCK_COUNT)) as server:
        asyncio.run(drain(server, 0, server.gateways[0], tiny_reference))
        asyncio.run(drain(server, 1, server.scheduler, tiny_reference))
        assert server.executor.wait() == 0
        # The scheduler is gone for good: whether the gateway hears of it or of our signal first
        # is not ours to say.
        server.gateways[1].signal(signal.SIGTERM)
        assert server.gateways[1].wait() in (0, LOST_EXIT_CODE)


def test_a_second_signal_ends_a_process_at_once(tiny_folder: Path) -> None:
    with serve(tiny_plan(tiny_folder, 2, BLOCK_COUNT)) as server:
        asyncio.run(force(server, 0, server.gateways[0]))
        asyncio.run(force(server, 1, server.scheduler))
        assert server.gateways[1].wait() == LOST_EXIT_CODE
        # It may have been told to stop, or have found the scheduler gone.
        assert server.executor.wait() in (0, LOST_EXIT_CODE)


@pytest.mark.parametrize("victim", ["executor", "scheduler"])
def test_a_killed_process_ends_the_streams_with_its_name(tiny_folder: Path, victim: str) -> None:
    async def scenario(server: Server, killed: Child) -> list[Reply]:
        async with connect(server.address, server.admin_address) as gateway:
            readers = await start_streams(gateway, long_requests(STREAM_COUNT))
            waiting = [
                asyncio.create_task(generate(gateway, request))
                for request in long_requests(3 * STREAM_COUNT)
            ]
            count = len(readers) + len(waiting)
            await statistics_when(gateway, lambda now: now.requests_total == count)
            killed.signal(signal.SIGKILL)
            return await asyncio.gather(*readers, *waiting)

    with serve(tiny_plan(tiny_folder, 1, BLOCK_COUNT)) as server:
        killed = server.executor if victim == "executor" else server.scheduler
        replies = asyncio.run(scenario(server, killed))
        for reply in replies:
            assert (reply.code, reply.reason) == ("UNAVAILABLE", f"{victim.upper()}_LOST")
        assert killed.wait() == -signal.SIGKILL
        for child in server.children:
            if child is not killed:
                assert child.wait() == LOST_EXIT_CODE, child.name
