"""Cancelling, deadlines, slow readers, drains, the loss of the scheduler: over real gRPC."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gapless.gateway import server
from gapless.gateway.health import INFERENCE_SERVICE
from gapless.protos import inference_pb2
from gapless.protos.messages import CancelCause, Failed, FinishReason, ServerState
from gapless.protos.reasons import Reason
from tests.gateway.fake_scheduler import FakeScheduler, facts
from tests.gateway.harness import (
    REVISION,
    collect,
    gateway_at,
    refused,
    request,
    running,
    token,
    tokens,
)
from tests.models import VOCAB_SIZE

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.mark.parametrize("moment", ["queued", "admitted", "streaming"])
def test_cancel_of_the_client_reaches_the_scheduler(moment: str) -> None:
    async def scenario() -> None:
        async with running() as it:
            it.scheduler.admits = moment != "queued"
            call = it.stub.Generate(request())
            submit = await it.scheduler.submitted()
            if moment == "streaming":
                it.scheduler.write(submit, [token("a")])
                await call.read()
            call.cancel()
            await it.scheduler.until(lambda: bool(it.scheduler.cancels))
            cancel = it.scheduler.cancels[0]
            assert cancel.handles == (submit.handle,)
            assert cancel.cause is CancelCause.CLIENT
            assert len(it.gateway.streams) == 0
            assert it.scheduler.live == {}

    asyncio.run(scenario())


def test_lost_connection_cancels() -> None:
    async def scenario() -> None:
        async with running() as it:
            async with grpc.aio.insecure_channel(
                it.gateway.addresses[0], [("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                stub = type(it.stub)(channel)
                call = stub.Generate(request())
                submit = await it.scheduler.submitted()
                it.scheduler.write(submit, [token("a")])
                await call.read()
            await it.scheduler.until(lambda: bool(it.scheduler.cancels))

    asyncio.run(scenario())


def test_deadline_is_handed_over_and_reaches_the_scheduler() -> None:
    async def scenario() -> None:
        async with running() as it:
            before_s = time.monotonic()
            found = await refused(it.stub.Generate(request(), timeout=1.0))
            assert found.code == "DEADLINE_EXCEEDED"
            submit = it.scheduler.submits[0]
            assert submit.deadline_s is not None
            assert 0 < submit.deadline_s - before_s < 2.0
            assert before_s <= submit.received_s < submit.deadline_s
            await it.scheduler.until(lambda: bool(it.scheduler.cancels))
            assert it.scheduler.cancels[0].handles == (submit.handle,)

    asyncio.run(scenario())


def test_deadline_of_the_server_holds_where_the_client_sets_none() -> None:
    async def scenario() -> None:
        async with running(deadline_max_s=100.0) as it:
            calls = [it.stub.Generate(request()), it.stub.Generate(request(), timeout=1000)]
            await it.scheduler.submitted(2)
            for submit in it.scheduler.submits:
                assert submit.deadline_s is not None
                assert submit.deadline_s - submit.received_s == pytest.approx(100)
                failed = Failed(submit.handle, Reason.DEADLINE, "the deadline has passed")
                it.scheduler.fail(submit, failed)
            for call in calls:
                found = await refused(call)
                assert (found.code, found.reason) == ("DEADLINE_EXCEEDED", "DEADLINE")

    asyncio.run(scenario())


def test_cancel_generate_ends_streams_well_at_any_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gapless.gateway")

    async def scenario() -> None:
        scheduler = FakeScheduler(tmp_path, facts(REVISION, VOCAB_SIZE))
        try:
            async with (
                gateway_at(tmp_path, scheduler) as one,
                gateway_at(tmp_path, scheduler) as two,
            ):
                call = one.stub.Generate(request(request_id="x:1"))
                submit = await scheduler.submitted()
                scheduler.write(submit, [token("a")])
                message = inference_pb2.CancelGenerateRequest(
                    request_ids=["nobody", "x:1", "x:1"], reason="test"
                )
                response = await two.stub.CancelGenerate(message)
                assert response.cancelled_request_ids == ["x:1"]
                answer = await collect(call)
                assert answer.text == "a"
                reason = answer.deltas[-1].finish.reason
                assert reason == inference_pb2.FINISH_REASON_CANCELLED
                again = await two.stub.CancelGenerate(message)
                assert again.cancelled_request_ids == []
        finally:
            scheduler.close()

    asyncio.run(scenario())
    said = [line for line in caplog.messages if line.startswith("cancel ")]
    assert said == [
        'cancel {"request_ids": ["x:1"], "reason": "test"}',
        'cancel {"request_ids": [], "reason": "test"}',
    ]


def test_cancel_generate_checks_its_request() -> None:
    async def scenario() -> None:
        async with running() as it:
            for ids, reason, field in (
                ([], "", "request_ids"),
                (["a"] * 1025, "", "request_ids"),
                (["a", "ü"], "", "request_ids[1]"),
                (["a"], "r" * 257, "reason"),
            ):
                message = inference_pb2.CancelGenerateRequest(request_ids=ids, reason=reason)
                found = await refused(it.stub.CancelGenerate(message))
                assert (found.code, found.fields) == ("INVALID_ARGUMENT", [field])

    asyncio.run(scenario())


def test_slow_reader_costs_its_log_and_then_its_stream() -> None:
    """The window is small and the client reads nothing: writes block, the scheduler goes on."""

    async def scenario() -> None:
        async with running(slow_consumer_s=0.5) as it:
            options = [
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", 64),
            ]
            output = inference_pb2.OutputOptions(prompt_token_ids=True, flush_interval_ms=0)
            async with grpc.aio.insecure_channel(it.gateway.addresses[0], options) as channel:
                stub = type(it.stub)(channel)
                call = stub.Generate(
                    request(output=output, stopping={"max_new_tokens": 300, "stop_strings": []})
                )
                submit = await it.scheduler.submitted()
                for _ in range(299):
                    it.scheduler.write(submit, tokens("x"))
                await it.scheduler.until(lambda: bool(it.scheduler.cancels))
                assert it.scheduler.cancels[0].cause is CancelCause.SLOW_CONSUMER
                found = await refused(call)
                assert (found.code, found.reason) == ("RESOURCE_EXHAUSTED", "SLOW_CONSUMER")
            assert len(it.gateway.streams) == 0

    asyncio.run(scenario())


# ------------------------------------------------------------------ health, drain


async def statuses(channel: Any, service: str, seen: list[int]) -> None:
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
    async for response in call:
        seen.append(response.status)


def test_drain_refuses_visibly_then_lets_streams_finish() -> None:
    async def scenario() -> None:
        async with running(lame_duck_s=0.5, drain_timeout_s=60.0) as it:
            seen: list[int] = []
            process: list[int] = []
            unknown: list[int] = []
            watches = [
                asyncio.create_task(statuses(it.channel, INFERENCE_SERVICE, seen)),
                asyncio.create_task(statuses(it.channel, "", process)),
                asyncio.create_task(statuses(it.channel, "nobody", unknown)),
            ]
            call = it.stub.Generate(request())
            submit = await it.scheduler.submitted()
            it.scheduler.write(submit, [token("a")])
            await call.read()
            it.gateway.stop()
            found = await refused(it.stub.Generate(request()))
            assert (found.code, found.reason) == ("UNAVAILABLE", "DRAINING")
            assert found.pushback_ms is not None
            health = health_pb2_grpc.HealthStub(it.channel)
            check = await health.Check(health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE))
            assert check.status == NOT_SERVING
            assert not it.task.done()
            it.scheduler.finish(submit, FinishReason.MAX_NEW_TOKENS, [token("b")])
            await it.scheduler.until(lambda: it.scheduler.goodbyes == 1)
            assert await it.task == 0
            assert (await call.read()).delta.text == "a"
            assert (await call.read()).delta.text == "b"
            assert (await call.read()).HasField("completed")
            assert await call.read() is grpc.aio.EOF
            await asyncio.gather(*watches)
            assert seen == [SERVING, NOT_SERVING], "the streams end well, having said so"
            assert process == [SERVING]
            assert unknown == [SERVICE_UNKNOWN]
            assert it.scheduler.cancels == []

    asyncio.run(scenario())


def test_drain_timeout_cancels_and_lets_the_last_messages_out() -> None:
    async def scenario() -> None:
        async with running(drain_timeout_s=0.1) as it:
            call = it.stub.Generate(request())
            submit = await it.scheduler.submitted()
            it.scheduler.write(submit, [token("a")])
            it.gateway.stop()
            answer = await collect(call)
            assert answer.text == "a"
            reason = answer.deltas[-1].finish.reason
            assert reason == inference_pb2.FINISH_REASON_CANCELLED
            assert it.scheduler.cancels[0].cause is CancelCause.DRAIN
            assert await it.task == 0

    asyncio.run(scenario())


def test_second_signal_ends_at_once() -> None:
    async def scenario() -> None:
        async with running(drain_timeout_s=600.0, lame_duck_s=600.0) as it:
            call = it.stub.Generate(request())
            await it.scheduler.submitted()
            it.gateway.stop()
            it.gateway.stop()
            assert await it.task == server.EXIT_FORCED
            assert (await refused(call)).code in ("UNAVAILABLE", "CANCELLED")

    asyncio.run(scenario())


def test_watchers_outlive_one_another() -> None:
    async def scenario() -> None:
        async with running() as it:
            seen: list[int] = []
            stays = asyncio.create_task(statuses(it.channel, INFERENCE_SERVICE, seen))
            leaves = health_pb2_grpc.HealthStub(it.channel).Watch(
                health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
            )
            await leaves.read()
            leaves.cancel()
            await until(lambda: len(it.gateway.health.watching(INFERENCE_SERVICE)) == 1 and seen)
            for state in (ServerState.FAILED, ServerState.SERVING, ServerState.DRAINING):
                count = len(seen)
                it.scheduler.set_state(state)
                await until(lambda count=count: len(seen) > count)
            assert seen == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]
            stays.cancel()

    asyncio.run(scenario())


async def until(condition: Any) -> None:
    """Gives the loop its turns until `condition` holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what changes lives inside the gateway
            await asyncio.sleep(0)


def test_health_of_unknown_service_is_not_found() -> None:
    async def scenario() -> None:
        async with running() as it:
            health = health_pb2_grpc.HealthStub(it.channel)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
            assert error.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(scenario())


# ------------------------------------------------------------------ loss of the scheduler


@pytest.mark.parametrize("how", ["socket", "silence"])
def test_lost_scheduler_fails_the_streams_and_ends_the_process(tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        scheduler = FakeScheduler(tmp_path, facts(REVISION, VOCAB_SIZE))
        silence_max_s = 3.0 if how == "silence" else 1000.0
        async with gateway_at(tmp_path, scheduler, silence_max_s=silence_max_s) as it:
            seen: list[int] = []
            watch = asyncio.create_task(statuses(it.channel, "", seen))
            with_token, without = it.stub.Generate(request()), it.stub.Generate(request())
            submit = await scheduler.submitted(2)
            scheduler.write(scheduler.submits[0], [token("a")])
            scheduler.write(submit, [token("a")])
            await with_token.read()
            if how == "socket":
                scheduler.close()
            for call in (with_token, without):
                found = await refused(call)
                assert (found.code, found.reason) == ("UNAVAILABLE", "SCHEDULER_LOST")
                assert found.metadata == {"generatedTokens": "1"}
            assert await it.task == server.EXIT_SCHEDULER_LOST
            await watch
            assert seen[-1] == NOT_SERVING
        if how != "socket":
            scheduler.close()

    asyncio.run(scenario())


def test_word_that_makes_no_sense_is_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running() as it:
            call = it.stub.Generate(request(stopping={"max_new_tokens": 2}))
            submit = await it.scheduler.submitted()
            it.scheduler.write(submit, tokens("abc"))
            found = await refused(call)
            assert (found.code, found.reason) == ("UNAVAILABLE", "SCHEDULER_LOST")
            assert await it.task == server.EXIT_SCHEDULER_LOST

    asyncio.run(scenario())
    assert "makes no sense" in caplog.text


def test_other_revision_of_the_model_is_no_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        scheduler = FakeScheduler(tmp_path, facts("another", VOCAB_SIZE))
        async with gateway_at(tmp_path, scheduler, ready=False) as it:
            assert await it.task == server.EXIT_MODEL_DIFFERS
        scheduler.close()

    asyncio.run(scenario())


def test_gateway_starts_before_the_scheduler(tmp_path: Path) -> None:
    async def scenario() -> None:
        model_facts = facts(REVISION, VOCAB_SIZE)
        nobody: Any = None
        async with gateway_at(tmp_path, nobody, ready=False) as it:
            found = await refused(it.stub.Generate(request()))
            assert (found.code, found.reason) == ("UNAVAILABLE", "STARTING")
            for call in (
                it.stub.GetModel(inference_pb2.GetModelRequest()),
                it.stub.ListModels(inference_pb2.ListModelsRequest()),
                it.stub.CancelGenerate(inference_pb2.CancelGenerateRequest(request_ids=["a"])),
            ):
                assert (await refused(call)).reason == "STARTING"
            seen: list[int] = []
            watch = asyncio.create_task(statuses(it.channel, INFERENCE_SERVICE, seen))
            scheduler = FakeScheduler(tmp_path, model_facts)
            await until(lambda: seen == [NOT_SERVING, SERVING])
            scheduler.plan = tokens("ok")
            assert (await collect(it.stub.Generate(request()))).text == "ok"
            assert len(scheduler.hellos) == 1
            assert scheduler.hellos[0].revision == REVISION
            watch.cancel()
        scheduler.close()

    asyncio.run(scenario())
