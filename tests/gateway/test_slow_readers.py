"""Clients that take nothing at all, and calls that end while their failure is told."""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import Any, Final

import grpc
import pytest

from gapless.gateway.boundary import Boundary
from gapless.gateway.failures import Failure
from gapless.protos import inference_pb2
from gapless.protos.messages import CancelCause
from gapless.protos.reasons import Reason
from tests.gateway.harness import request, running, tokens

METHOD: Final = "/gapless.v1.InferenceService/Generate"
DATA, HEADERS, SETTINGS, WINDOW_UPDATE = 0, 1, 4, 8
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE: Final = 4
STREAM: Final = 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, value: str) -> bytes:
    """One header of HPACK, as plain text."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def opening(message: inference_pb2.GenerateRequest) -> bytes:
    """A connection with one call on it, and no window to answer in."""
    body = message.SerializeToString()
    method_post, scheme_http = b"\x83", b"\x86"
    headers = (
        method_post
        + scheme_http
        + header(":path", METHOD)
        + header(":authority", "localhost")
        + header("te", "trailers")
        + header("content-type", "application/grpc")
    )
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
        + frame(HEADERS, END_HEADERS, STREAM, headers)
        + frame(DATA, END_STREAM, STREAM, struct.pack(">BI", 0, len(body)) + body)
    )


async def read_to_end(reader: asyncio.StreamReader) -> list[int]:
    """Kinds of the frames of the call, up to the one that ends it."""
    kinds: list[int] = []
    while True:
        head = await reader.readexactly(9)
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        if stream == STREAM and kind in (DATA, HEADERS):
            kinds.append(kind)
            if flags & END_STREAM:
                return kinds


def test_client_that_takes_not_even_the_first_message_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with running(slow_consumer_s=0.5) as it:
            host, port = it.gateway.addresses[0].rsplit(":", 1)
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(opening(request()))
            submit = await it.scheduler.submitted()
            it.scheduler.write(submit, tokens("x"))
            await it.scheduler.until(lambda: bool(it.scheduler.cancels))
            assert it.scheduler.cancels[0].cause is CancelCause.SLOW_CONSUMER
            assert len(it.gateway.streams) == 0
            writer.write(frame(WINDOW_UPDATE, 0, STREAM, struct.pack(">I", 1 << 20)))
            async with asyncio.timeout(20):
                assert await read_to_end(reader) == [HEADERS, DATA, HEADERS]
            writer.close()
            await writer.wait_closed()

    asyncio.run(scenario())
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    "error", [Failure(Reason.DEADLINE, "late"), grpc.aio.InternalError("over")]
)
def test_call_that_is_over_before_its_failure_is_told_ends_as_cancelled(error: Exception) -> None:
    class Context:
        """Of a call that gRPC has ended, without having told us yet."""

        async def abort(self, *_status: object) -> None:
            raise grpc.aio.InternalError("over")

    async def behaviour(_request: object, _context: object) -> None:
        raise error

    async def scenario() -> None:
        async def continuation(_details: object) -> Any:
            return grpc.unary_stream_rpc_method_handler(behaviour)

        details: Any = type("Details", (), {"method": METHOD})
        handler = await Boundary().intercept_service(continuation, details)
        with pytest.raises(asyncio.CancelledError):
            await handler.unary_stream(None, Context())

    asyncio.run(scenario())
