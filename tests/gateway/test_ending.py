"""What clients hear whose calls meet the end of a gateway: the reason, whatever hurries it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gapless.gateway import server
from tests.gateway.fake_scheduler import FakeScheduler, facts
from tests.gateway.harness import REVISION, gateway_at, refused, request, running, tokens
from tests.models import VOCAB_SIZE

TOKEN_COUNT = 299
CALL_COUNT = 50
SMALL_WINDOW = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64),
)
"""Of a client's channel: it takes little that nobody reads."""


def test_first_signal_after_a_loss_leaves_streams_time_to_tell_it(tmp_path: Path) -> None:
    """The supervisor sends one as soon as the scheduler has died; this client reads only then."""

    async def scenario() -> None:
        scheduler = FakeScheduler(tmp_path, facts(REVISION, VOCAB_SIZE))
        async with (
            gateway_at(tmp_path, scheduler) as it,
            grpc.aio.insecure_channel(it.gateway.addresses[0], SMALL_WINDOW) as channel,
        ):
            health = health_pb2_grpc.HealthStub(it.channel).Watch(health_pb2.HealthCheckRequest())
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            call = type(it.stub)(channel).Generate(
                request(output={"flush_interval_ms": 0}, stopping={"max_new_tokens": 300})
            )
            submit = await scheduler.submitted()
            for _ in range(TOKEN_COUNT):
                scheduler.write(submit, tokens("x"))
            scheduler.close()
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            it.gateway.stop()
            found = await refused(call)
            assert (found.code, found.reason) == ("UNAVAILABLE", "SCHEDULER_LOST")
            assert found.metadata == {"generatedTokens": str(TOKEN_COUNT)}
            assert await it.task == server.EXIT_SCHEDULER_LOST

    asyncio.run(scenario())


def test_calls_that_have_come_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC hands calls over one by one, and cancels what it still has when the server stops."""
    monkeypatch.setattr(server, "QUIET_S", 1.0)
    monkeypatch.setattr(server, "LAST_CALLS_S", 60.0)

    async def scenario() -> None:
        async with running() as it:
            it.gateway.stop()
            for call in [it.stub.Generate(request()) for _ in range(CALL_COUNT)]:
                found = await refused(call)
                assert (found.code, found.reason) == ("UNAVAILABLE", "DRAINING")
            assert await it.task == server.EXIT_OK

    asyncio.run(scenario())
