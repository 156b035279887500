"""The border between grpc.aio and the servicers: what no servicer should have to think of.

An interceptor around every method of every service on the port (health and reflection included):

* a request that is no message is INVALID_ARGUMENT / INVALID_FIELD (grpc.aio itself answers
  UNKNOWN, a code that this server never sends);
* a `Failure` becomes its status;
* any other exception is ours: INTERNAL / ENGINE_ERROR to the client, the traceback to the log;
* a cancelled call and an aborted one pass untouched;
* an operation that gRPC could not do any more, as the call is over, ends the call as cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from gapless.gateway import failures
from gapless.gateway.failures import Failure, Violation

_LOG = logging.getLogger("gapless.gateway")

_Handler = Callable[[Any, Any], Any]


class _Malformed:
    """Stands for a request whose bytes are no message of its type."""


_MALFORMED: Final = _Malformed()


class Boundary(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """See the module. Add it as the outermost interceptor of a server."""

    def __init__(self) -> None:
        self.call_count = 0
        """Calls that have come."""

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Returns the method's handler, wrapped; None (unknown method) stays None."""
        self.call_count += 1
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        parse = _tolerant(handler.request_deserializer)
        serialize = handler.response_serializer
        method = handler_call_details.method
        if handler.request_streaming:
            assert handler.response_streaming, f"{method}: no client-streaming method exists"
            return grpc.stream_stream_rpc_method_handler(
                _guard_bidirectional(handler.stream_stream, method), parse, serialize
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream, method), parse, serialize
            )
        return grpc.unary_unary_rpc_method_handler(
            _guard_unary(handler.unary_unary, method), parse, serialize
        )


def _tolerant(deserializer: Callable[[bytes], Message]) -> Callable[[bytes], Message | _Malformed]:
    def parse(data: bytes) -> Message | _Malformed:
        try:
            return deserializer(data)
        except DecodeError:
            return _MALFORMED

    return parse


def _refuse_malformed(request: object) -> None:
    if request is _MALFORMED:
        raise failures.invalid((Violation("", "the request is no valid protobuf message"),))


async def _fail(context: Any, error: Exception, method: str, request: object) -> None:
    """Ends the call as `error` demands; returns only if the error must pass as it is."""
    if isinstance(error, grpc.aio.InternalError):
        raise _cancelled(error, method) from None
    if isinstance(error, grpc.aio.BaseError):  # aborted, or over already
        return
    if not isinstance(error, Failure):
        request_id = getattr(request, "request_id", "")
        _LOG.error("%s failed, request %r", method, request_id, exc_info=error)
        error = failures.engine_error(request_id)
    try:
        await failures.abort(context, error)
    except grpc.aio.InternalError as late:
        raise _cancelled(late, method) from None


def _cancelled(error: grpc.aio.InternalError, method: str) -> asyncio.CancelledError:
    """What a call ends with that is over: gRPC may notice only after we do, and is then loud."""
    _LOG.info("%s: the call was over already: %s", method, error)
    return asyncio.CancelledError()


def _guard_unary(behaviour: _Handler, method: str) -> _Handler:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            _refuse_malformed(request)
            return await behaviour(request, context)
        except Exception as error:
            await _fail(context, error, method, request)
            raise

    return guarded


def _guard_stream(behaviour: _Handler, method: str) -> _Handler:
    async def guarded(request: Any, context: Any) -> None:
        try:
            _refuse_malformed(request)
            await behaviour(request, context)
        except Exception as error:
            await _fail(context, error, method, request)
            raise

    return guarded


def _guard_bidirectional(behaviour: _Handler, method: str) -> _Handler:
    async def checked(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            _refuse_malformed(request)
            yield request

    async def guarded(requests: AsyncIterator[Any], context: Any) -> None:
        try:
            async for response in behaviour(checked(requests), context):
                await context.write(response)
        except Exception as error:
            await _fail(context, error, method, None)
            raise

    return guarded
