"""The table of reasons, walked both ways over a real connection."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

from gapless.client import BugError, Client, GaplessError, LostError, NoServerError, RefusedError
from gapless.client.errors import CLASSES
from gapless.protos.reasons import TABLE, Family, Reason
from tests.client.standin import Events, refuse, standin_server, started


def fail_with(reason: Reason, *details: Any, **metadata: str) -> GaplessError:
    """What the client raises when a server refuses a Generate with this."""

    async def script(request: Any, context: Any) -> Events:
        await refuse(context, reason, *details, **metadata)
        yield started()

    async def run() -> GaplessError:
        async with standin_server(script) as server, Client(server.address) as client:
            with pytest.raises(GaplessError) as caught:
                await client.generate("x").text()
            return caught.value

    return asyncio.run(run())


@pytest.mark.parametrize("reason", list(Reason))
def test_each_reason_becomes_the_class_of_its_family(reason: Reason) -> None:
    error = fail_with(reason)
    assert type(error) is CLASSES[TABLE[reason].family]
    assert (error.reason, error.code) == (reason, TABLE[reason].code)
    assert str(error) == f"because of {reason}"


def test_each_class_is_one_family_and_each_family_has_a_reason() -> None:
    assert CLASSES.keys() == set(Family)
    assert len(set(CLASSES.values())) == len(Family)
    for kind in CLASSES.values():
        assert [row for row in TABLE.values() if CLASSES[row.family] is kind]


def test_details_are_carried() -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="0")
    error = fail_with(
        Reason.INVALID_FIELD,
        error_details_pb2.BadRequest(field_violations=[violation]),
        error_details_pb2.RetryInfo(
            retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000)
        ),
        promptTokens="9",
    )
    assert [(v.field, v.description) for v in error.violations] == [("sampling.top_p", "0")]
    assert error.retry_after_s == 1.5
    assert dict(error.metadata) == {"promptTokens": "9"}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, RefusedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, RefusedError),
        (grpc.StatusCode.UNAUTHENTICATED, RefusedError),
        (grpc.StatusCode.CANCELLED, LostError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, LostError),
        (grpc.StatusCode.UNKNOWN, BugError),
        (grpc.StatusCode.INTERNAL, BugError),
    ],
)
def test_a_status_without_reason_is_judged_by_its_code(
    code: grpc.StatusCode, kind: type[GaplessError]
) -> None:
    async def before(context: Any) -> None:
        await context.abort(code, "by gRPC itself")

    async def run() -> GaplessError:
        async with standin_server() as server, Client(server.address) as client:
            server.before = before
            with pytest.raises(GaplessError) as caught:
                await client.tokenize("x")
            return caught.value

    error = asyncio.run(run())
    assert type(error) is kind
    assert (error.reason, error.code) == (None, code.name)


def test_a_reason_of_a_newer_server_is_kept_as_text() -> None:
    async def script(request: Any, context: Any) -> Events:
        info = error_details_pb2.ErrorInfo(reason="CURSOR_AHEAD", domain="gapless.v1")
        await refuse(context, Reason.QUEUE_FULL, info)
        yield started()

    async def run() -> GaplessError:
        async with standin_server(script) as server, Client(server.address) as client:
            with pytest.raises(RefusedError) as caught:
                await client.generate("x").text()
            return caught.value

    assert asyncio.run(run()).reason == "CURSOR_AHEAD"


def test_nobody_at_the_address() -> None:
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        async def run() -> None:
            async with Client(address) as client:
                with pytest.raises(NoServerError):
                    await client.models()
                with pytest.raises(NoServerError):
                    await client.health()

        asyncio.run(run())


def test_a_server_that_admits_nothing_is_not_a_missing_server() -> None:
    async def run() -> None:
        async with standin_server(serving=False) as server, Client(server.address) as client:
            with pytest.raises(LostError, match="starting or draining") as caught:
                await client.models()
            assert type(caught.value) is LostError
            assert await client.cancel("r-1") == ["r-1"]

    asyncio.run(run())
