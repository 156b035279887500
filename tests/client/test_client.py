"""The client against a stand-in server over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

import grpc
import pytest
from google.protobuf import json_format

from gapless.client import (
    BugError,
    Client,
    Delta,
    Finish,
    FinishReason,
    GaplessError,
    GenerateOptions,
    HealthStatus,
    LostError,
)
from gapless.client.requests import GENERATE_FIELDS, generate_request
from gapless.protos import inference_pb2
from gapless.protos.reasons import Reason
from tests.client.standin import (
    Events,
    Script,
    Standin,
    completed,
    delta,
    hello,
    last,
    refuse,
    standin_server,
    started,
)


def with_server(
    body: Callable[[Standin, Client], Awaitable[None]],
    script: Script = hello,
    *,
    serving: bool | None = True,
) -> None:
    async def run() -> None:
        async with (
            standin_server(script, serving=serving) as server,
            Client(server.address, admin_address=server.address) as client,
        ):
            await body(server, client)

    asyncio.run(run())


async def endless(request: inference_pb2.GenerateRequest, context: Any) -> Events:
    """Some tokens, then silence until the call is cancelled."""
    yield started()
    for index in range(3):
        yield delta("a", index)
    await asyncio.Event().wait()


def test_a_stream_yields_deltas_then_says_how_it_went() -> None:
    async def body(server: Standin, client: Client) -> None:
        stream = client.generate("hi", temperature=0.0, max_new_tokens=8)
        assert stream.started is None
        deltas = [delta async for delta in stream]
        assert deltas == [
            Delta(0, 0, 1, "Hel"),
            Delta(0, 1, 2, "lo"),
            Delta(0, 3, 1, "!", finish=Finish(FinishReason.STOP_TOKEN)),
        ]
        assert stream.started is not None
        assert stream.started.prompt_tokens == 3
        assert stream.completed is not None
        assert stream.completed.usage.completion_tokens == 4
        assert stream.completed.timing.time_to_first_token_s == 0.25
        assert stream.completed.seed == 2**63 + 1
        assert await stream.text() == "Hello!"
        request = server.requests[0]
        assert request.sampling.HasField("temperature")
        assert not request.sampling.HasField("top_p")

    with_server(body)


def test_text_reads_the_whole_stream() -> None:
    async def body(server: Standin, client: Client) -> None:
        assert (
            await client.generate(messages=[{"role": "user", "content": "hi"}]).text() == "Hello!"
        )
        assert server.requests[0].prompt.chat.messages[0].content == "hi"

    with_server(body)


def test_works_without_a_health_service() -> None:
    async def body(server: Standin, client: Client) -> None:
        assert await client.generate(token_ids=[1, 2]).text() == "Hello!"

    with_server(body, serving=None)


async def leave_by_break(client: Client) -> None:
    async for _ in client.generate("x"):
        break


async def leave_by_break_while_the_stream_is_held(client: Client) -> None:
    stream = client.generate("x")
    client.held = stream  # type: ignore[attr-defined]
    async for _ in stream:
        break
    with pytest.raises(RuntimeError, match="before its end"):
        await stream.text()


async def leave_by_exception(client: Client) -> None:
    async def read() -> None:
        async for _ in client.generate("x"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read()


async def leave_by_aclose(client: Client) -> None:
    async with client.generate("x") as stream:
        iterator = aiter(stream)
        await anext(iterator)
    assert [delta async for delta in iterator] == []


async def leave_by_aclose_of_another_task(client: Client) -> None:
    stream = client.generate("x")
    first = asyncio.Event()

    async def read() -> int:
        count = 0
        async for _ in stream:
            count += 1
            first.set()
        return count

    reader = asyncio.create_task(read())
    await first.wait()
    await stream.aclose()
    assert await reader >= 1


async def leave_by_task_cancellation(client: Client) -> None:
    first = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate("x"):
            first.set()

    reader = asyncio.create_task(read())
    await first.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_break_while_the_stream_is_held,
        leave_by_exception,
        leave_by_aclose,
        leave_by_aclose_of_another_task,
        leave_by_task_cancellation,
    ],
)
def test_leaving_the_loop_cancels_on_the_server(leave: Callable[[Client], Awaitable[None]]) -> None:
    async def body(server: Standin, client: Client) -> None:
        await leave(client)
        await server.calls_cancelled.acquire()

    with_server(body, endless)


def test_a_stream_closed_before_it_begins_sends_nothing() -> None:
    async def body(server: Standin, client: Client) -> None:
        stream = client.generate("x")
        await stream.aclose()
        assert [delta async for delta in stream] == []
        with pytest.raises(RuntimeError, match="only once"):
            await anext(aiter(stream))
        assert server.requests == []

    with_server(body)


def test_unknown_events_and_fields_are_passed_over() -> None:
    # Field 15 of the oneof (length-delimited, tag 0x7a) is an event of a later version.
    unknown = inference_pb2.GenerateResponse.FromString(b"\x7a\x03abc")
    assert unknown.WhichOneof("event") is None

    async def script(request: Any, context: Any) -> Events:
        yield unknown
        yield started()
        yield inference_pb2.GenerateResponse(progress=inference_pb2.GenerationProgress())
        yield unknown
        yield last("ok", 0)
        yield completed(1)

    async def body(server: Standin, client: Client) -> None:
        stream = client.generate("x")
        assert [delta.text async for delta in stream] == ["ok"]

    with_server(body, script)


def test_an_unknown_finish_reason_is_named_so() -> None:
    assert FinishReason.read(99) is FinishReason.UNKNOWN
    for value in inference_pb2.FinishReason.DESCRIPTOR.values[1:]:
        assert FinishReason.read(value.number) is not FinishReason.UNKNOWN


def test_unavailable_is_retried_before_the_first_message() -> None:
    attempts = 0

    async def script(request: Any, context: Any) -> Events:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            await refuse(context, Reason.STARTING)
        async for event in hello(request, context):
            yield event

    async def body(server: Standin, client: Client) -> None:
        assert await client.generate("x").text() == "Hello!"
        assert attempts == 3

    with_server(body, script)


def test_unavailable_is_not_retried_after_the_first_message() -> None:
    async def script(request: Any, context: Any) -> Events:
        yield started()
        yield delta("a", 0)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async def body(server: Standin, client: Client) -> None:
        deltas = aiter(client.generate("x"))
        assert (await anext(deltas)).text == "a"
        with pytest.raises(LostError) as caught:
            await anext(deltas)
        assert type(caught.value) is LostError
        assert len(server.requests) == 1

    with_server(body, script)


def test_a_refusal_is_not_retried() -> None:
    async def script(request: Any, context: Any) -> Events:
        await refuse(context, Reason.QUEUE_FULL)
        yield started()

    async def body(server: Standin, client: Client) -> None:
        with pytest.raises(GaplessError):
            await client.generate("x").text()
        assert len(server.requests) == 1

    with_server(body, script)


def test_a_stream_without_completed_is_the_servers_mistake() -> None:
    async def script(request: Any, context: Any) -> Events:
        yield started()

    async def body(server: Standin, client: Client) -> None:
        with pytest.raises(BugError, match="completed"):
            await client.generate("x").text()

    with_server(body, script)


def test_the_deadline_reaches_the_server() -> None:
    remaining: list[float] = []

    async def script(request: Any, context: Any) -> Events:
        remaining.append(context.time_remaining())
        async for event in hello(request, context):
            yield event

    async def body(server: Standin, client: Client) -> None:
        await client.generate("x", timeout_s=1000).text()
        assert 0 < remaining[0] <= 1000

    with_server(body, script)


def test_the_small_calls() -> None:
    async def body(server: Standin, client: Client) -> None:
        tokens = await client.tokenize("abcd", return_offsets=True)
        assert (tokens.token_ids, tokens.offsets) == ((5, 6), ((0, 2), (2, 4)))
        assert await client.detokenize([4, 5]) == "4 5"
        assert not server.requests[-1].HasField("skip_special_tokens")
        (model,) = await client.models()
        assert model == await client.model()
        assert model.bos_token_id is None
        assert dict(model.default_sampling) == {"top_k": 40}
        assert await client.cancel(["r-1", "r-2"]) == ["r-1"]
        stats = await client.stats()
        assert (stats.state, stats.running_requests) == ("SERVING", 7)
        assert (stats.kv_blocks_active, stats.kv_blocks_free) == (7, 11)

    with_server(body)


def test_stats_needs_the_admin_address() -> None:
    async def run() -> None:
        async with Client("127.0.0.1:1") as client:
            with pytest.raises(ValueError, match="admin_address"):
                await client.stats()

    asyncio.run(run())


def test_health_and_its_changes() -> None:
    async def body(server: Standin, client: Client) -> None:
        assert await client.health() is HealthStatus.SERVING
        assert await client.health("nobody") is HealthStatus.SERVICE_UNKNOWN
        seen = []
        async for status in client.watch_health():
            seen.append(status)
            if len(seen) == 3:
                break
            await server.set_serving(len(seen) == 2)
        assert seen == [HealthStatus.SERVING, HealthStatus.NOT_SERVING, HealthStatus.SERVING]

    with_server(body)


def test_every_option_has_its_place() -> None:
    assert GENERATE_FIELDS.keys() == get_type_hints(GenerateOptions).keys()
    request = generate_request(
        None,
        [{"role": "user", "content": "x"}],
        None,
        {
            "logit_bias": {7: -1.0},
            "stop_strings": ["a", "b"],
            "soft_time_limit_s": 1.5,
            "template_kwargs": {"deep": {"er": 1}},
            "return_token_ids": True,
            "labels": {"who": "me"},
            "seed": None,
        },
    )
    assert request.sampling.logit_bias == {7: -1.0}
    assert request.stopping.stop_strings == ["a", "b"]
    assert request.stopping.soft_time_limit.ToTimedelta().total_seconds() == 1.5
    assert json_format.MessageToDict(request.prompt.chat.template_kwargs) == {"deep": {"er": 1}}
    assert request.output.token_ids
    assert not request.sampling.HasField("seed")


NOT_OFFERED = {
    "sampling": {"choices"},
    "stopping": set[str](),
    "output": {"logprobs", "prompt_logprobs", "progress_interval_ms"},
    "scheduling": set[str](),
}
"""Fields that the client has no option for yet, because no server honours them."""


@pytest.mark.parametrize("part", list(NOT_OFFERED))
def test_every_field_is_an_option_or_named_as_missing(part: str) -> None:
    descriptor = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name[part].message_type
    assert descriptor is not None
    offered = {
        path.split(".")[1] for path in GENERATE_FIELDS.values() if path.startswith(f"{part}.")
    }
    assert offered | NOT_OFFERED[part] == set(descriptor.fields_by_name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one"),
        ({"prompt": "a", "token_ids": [1]}, "exactly one"),
        ({"prompt": "a", "temprature": 1.0}, "temprature"),
        ({"prompt": "a", "chat_template": "x"}, "needs messages"),
        ({"prompt": "a", "temperature": "warm"}, "warm|number|real"),
    ],
)
def test_wrong_arguments_are_type_errors(arguments: dict[str, Any], message: str) -> None:
    async def run() -> None:
        async with Client("127.0.0.1:1") as client:
            with pytest.raises(TypeError, match=message):
                client.generate(**arguments)

    asyncio.run(run())
