"""Errors as clients see them: states, the scheduler's refusals, bytes that are no message."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2

from gapless.gateway import failures
from gapless.gateway.failures import Failure, Resource, Violation
from gapless.gateway.preparation import SHORT_PROMPT_BYTES
from gapless.protos import inference_pb2
from gapless.protos.messages import Failed, ServerState
from gapless.protos.reasons import TABLE, Reason
from tests.gateway.harness import Answer, collect, refused, request, running, token


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_status_and_details(reason: Reason) -> None:
    failure = Failure(reason, "why\nso", metadata={"key": "value"})
    status = failures.rich_status(failure)
    assert failure.code.name == TABLE[reason].code
    assert failure.code is not grpc.StatusCode.UNKNOWN
    assert status.message == "why so"
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason.value, "gapless.v1")
    assert info.metadata["key"] == "value"
    retry = error_details_pb2.RetryInfo()
    advised = any(detail.Unpack(retry) for detail in status.details)
    assert advised == (reason in failures.RETRY_AFTER_S)
    if TABLE[reason].retry:
        assert advised, "a retried reason says when"


def test_details_fit_what_clients_accept() -> None:
    many = tuple(Violation("é" * 10_000, "ü" * 10_000) for _ in range(50))
    failure = Failure(
        Reason.INVALID_FIELD,
        "😀" * 10_000,
        metadata={f"{index}" * 1000: "é" * 1000 for index in range(50)},
        violations=many,
        resource=Resource("model", "é" * 10_000),
    )
    status = failures.rich_status(failure)
    base64_bytes = len(status.SerializeToString()) * 4 / 3
    percent_bytes = len(status.message.encode()) * 3
    assert base64_bytes + percent_bytes < 8192
    any_pb2.Any().ParseFromString(status.details[0].SerializeToString())


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (ServerState.STARTING, "STARTING"),
        (ServerState.DRAINING, "DRAINING"),
        (ServerState.FAILED, "NO_EXECUTOR"),
    ],
)
def test_nothing_is_submitted_unless_the_scheduler_serves(state: ServerState, reason: str) -> None:
    async def scenario() -> None:
        async with running() as it:
            it.scheduler.set_state(state)
            await it.scheduler.until(lambda: True)
            # The state is known once an answer that was asked for later is there.
            await it.stub.CancelGenerate(inference_pb2.CancelGenerateRequest(request_ids=["a"]))
            invalid = inference_pb2.SamplingParams(temperature=9)
            found = await refused(it.stub.Generate(request(sampling=invalid)))
            assert (found.code, found.reason) == ("UNAVAILABLE", reason), "before any other rule"
            assert found.retry_after_s is not None
            assert found.pushback_ms == round(found.retry_after_s * 1000)
            assert it.scheduler.submits == []

    asyncio.run(scenario())


SCHEDULERS = [
    (Reason.QUEUE_FULL, "RESOURCE_EXHAUSTED", {}),
    (Reason.REQUEST_ID_IN_USE, "ALREADY_EXISTS", {}),
    (Reason.KV_CAPACITY_EXCEEDED, "INVALID_ARGUMENT", {"promptTokens": "5"}),
    (Reason.NO_EXECUTOR, "UNAVAILABLE", {}),
    (Reason.DRAINING, "UNAVAILABLE", {}),
    (Reason.QUEUE_TIMEOUT, "DEADLINE_EXCEEDED", {"queuedMs": "12"}),
    (Reason.DEADLINE, "DEADLINE_EXCEEDED", {}),
    (Reason.ENGINE_ERROR, "INTERNAL", {}),
]


@pytest.mark.parametrize(("reason", "code", "metadata"), SCHEDULERS)
@pytest.mark.parametrize("admitted", [False, True])
def test_failure_before_the_first_token_is_a_status_without_headers(
    reason: Reason, code: str, metadata: dict[str, str], admitted: bool
) -> None:
    async def scenario() -> None:
        async with running() as it:
            it.scheduler.admits = admitted
            call = it.stub.Generate(request(request_id="mine"))
            submit = await it.scheduler.submitted()
            failed = Failed(submit.handle, reason, "because", metadata, 2.5)
            it.scheduler.fail(submit, failed)
            found = await refused(call)
            assert (found.code, found.reason, found.message) == (code, reason.value, "because")
            assert metadata.items() <= found.metadata.items()
            assert (found.retry_after_s, found.pushback_ms) == (2.5, 2500)
            if reason is Reason.REQUEST_ID_IN_USE:
                assert found.resource == ("request", "mine")
            if reason is Reason.ENGINE_ERROR:
                assert found.metadata == {"requestId": "mine"}
            assert not await call.initial_metadata(), "the client may retry: nothing was sent"
            assert not it.scheduler.cancels
            assert len(it.gateway.streams) == 0

    asyncio.run(scenario())


def test_failure_after_tokens_comes_behind_them() -> None:
    async def scenario() -> None:
        async with running() as it:
            slow = inference_pb2.OutputOptions(flush_interval_ms=1000)
            call = it.stub.Generate(request(output=slow))
            submit = await it.scheduler.submitted()
            it.scheduler.write(submit, [token("a")])
            await call.read()
            assert (await call.read()).delta.text == "a"
            it.scheduler.write(submit, [token("b"), token("c")])
            it.scheduler.fail(submit, Failed(submit.handle, Reason.EXECUTOR_LOST, "gone"))
            assert (await call.read()).delta.text == "bc"
            found = await refused(call)
            assert (found.code, found.reason) == ("UNAVAILABLE", "EXECUTOR_LOST")
            assert found.metadata == {"generatedTokens": "3"}

    asyncio.run(scenario())


METHODS = [
    "/gapless.v1.InferenceService/Generate",
    "/gapless.v1.InferenceService/CancelGenerate",
    "/gapless.v1.InferenceService/Tokenize",
    "/gapless.v1.InferenceService/Detokenize",
    "/gapless.v1.InferenceService/GetModel",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
]


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message(method: str) -> None:
    async def scenario() -> None:
        async with running() as it:
            for data in (b"\x0a\x02\xc3\x28", b"\x0a\xff", b"\xff\xff\xff\xff"):
                found = await refused(raw_call(it.channel, method, data))
                assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
            it.scheduler.plan = [5]
            await collect(it.stub.Generate(request()))

    asyncio.run(scenario())


def test_text_that_is_no_utf8() -> None:
    """A GenerateRequest whose prompt.text is C3 28, as no conforming client can send it."""

    async def scenario() -> None:
        async with running() as it:
            data = bytes.fromhex("22040a02c328")
            found = await refused(raw_call(it.channel, METHODS[0], data))
            assert (found.code, found.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")

    asyncio.run(scenario())


def raw_call(channel: Any, method: str, data: bytes) -> Any:
    """A call whose request is `data` as it is."""
    streams = method.endswith(("Generate", "Watch", "WatchStats")) and "Cancel" not in method
    kind = channel.unary_stream if streams else channel.unary_unary
    return kind(method, request_serializer=None, response_deserializer=None)(data)


def test_unknown_method() -> None:
    async def scenario() -> None:
        async with running() as it:
            method = "/gapless.v1.InferenceService/Embed"
            assert (await refused(raw_call(it.channel, method, b""))).code == "UNIMPLEMENTED"

    asyncio.run(scenario())


def test_bug_is_internal_with_the_id_for_the_logs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_arguments: object, **_fields: object) -> None:
        raise KeyError("secret prompt")

    monkeypatch.setattr("gapless.gateway.admission.fit", broken)

    async def scenario() -> None:
        async with running() as it:
            found = await refused(it.stub.Generate(request(request_id="r-1")))
            assert (found.code, found.reason) == ("INTERNAL", "ENGINE_ERROR")
            assert found.metadata == {"requestId": "r-1"}
            assert "secret" not in found.message
            drawn = await refused(it.stub.Generate(request()))
            assert len(drawn.metadata["requestId"]) == 32, "also an id that the server drew"

    with caplog.at_level(logging.ERROR, "gapless.gateway"):
        asyncio.run(scenario())
    assert any(record.exc_info and "r-1" in record.getMessage() for record in caplog.records)


def test_too_large_a_message_is_refused_by_the_transport() -> None:
    async def scenario() -> None:
        async with running() as it:
            prompt = inference_pb2.Prompt(text="x" * (17 << 20))
            found = await refused(it.stub.Generate(request(prompt=prompt)))
            assert found.code == "RESOURCE_EXHAUSTED"

    asyncio.run(scenario())


def test_too_many_requests_in_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(preparing_max=0) as it:
            prompt = inference_pb2.Prompt(text="x" * (SHORT_PROMPT_BYTES + 1))
            found = await refused(it.stub.Generate(request(prompt=prompt)))
            assert (found.code, found.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
            assert found.pushback_ms is not None
            message = inference_pb2.ChatMessage(role="user", content="x" * SHORT_PROMPT_BYTES)
            chat = inference_pb2.ChatPrompt(messages=[message])
            found = await refused(it.stub.Generate(request(prompt=inference_pb2.Prompt(chat=chat))))
            assert found.reason == "QUEUE_FULL"
            it.scheduler.plan = [token("q")]
            message.content = "x"
            chat = inference_pb2.ChatPrompt(messages=[message])
            for short in (inference_pb2.Prompt(text="x"), inference_pb2.Prompt(chat=chat)):
                answer = await collect(it.stub.Generate(request(prompt=short)))
                assert answer.text == "q", "a short prompt waits for no thread"

    asyncio.run(scenario())


def test_one_log_line_a_request_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> Answer:
        async with running() as it:
            it.scheduler.plan = [token("q")] * 3
            prompt = inference_pb2.Prompt(text="secret")
            return await collect(
                it.stub.Generate(request(request_id="r-2", prompt=prompt, labels={"team": "x"}))
            )

    with caplog.at_level(logging.INFO, "gapless.gateway.requests"):
        asyncio.run(scenario())
    lines = [r.getMessage() for r in caplog.records if r.name == "gapless.gateway.requests"]
    assert len(lines) == 1
    assert '"request_id": "r-2"' in lines[0]
    assert '"outcome": "OK"' in lines[0]
    assert '"finish": "MAX_NEW_TOKENS"' in lines[0]
    assert '"team": "x"' in lines[0]
    assert "secret" not in lines[0]
    assert "qqq" not in lines[0]
