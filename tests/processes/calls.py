"""What a test sees of one call: replies joined, failures taken apart.

Owns no connection. Called by the tests of real processes and by the runner of recorded cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import grpc
from google.rpc import error_details_pb2, status_pb2

from gapless.protos import admin_pb2, inference_pb2
from gapless.protos.admin_pb2_grpc import AdminServiceStub
from gapless.protos.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:  # these two names exist for type checkers only
    from gapless.protos.admin_pb2_grpc import AdminServiceAsyncStub
    from gapless.protos.inference_pb2_grpc import InferenceServiceAsyncStub

CALL_LIMIT_S = 100.0
"""Deadline of every call that should end by itself: a hang is a failure, not a hang."""
SNAPSHOT_INTERVAL_MS = 100


@dataclass(frozen=True, slots=True)
class Failure:
    """A status that is not OK."""

    code: str
    details: str
    reason: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    """Of the BadRequest violations."""

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Failure:
        code, details = error.code().name, error.details() or ""
        packed = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
        if packed is None:
            return cls(code, details)
        assert isinstance(packed, bytes)
        status = status_pb2.Status.FromString(packed)
        assert grpc.StatusCode[code].value[0] == status.code, f"{status} under the code {code}"
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        for detail in status.details:
            _ = detail.Unpack(info) or detail.Unpack(bad_request)
        violations = tuple(violation.field for violation in bad_request.field_violations)
        return cls(code, details, info.reason, dict(info.metadata), violations)


@dataclass(slots=True)
class Reply:
    """Everything that one Generate brought."""

    started: inference_pb2.GenerationStarted | None = None
    deltas: list[inference_pb2.GenerationDelta] = field(default_factory=list)
    completed: inference_pb2.GenerationCompleted | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def code(self) -> str:
        return "OK" if self.failure is None else self.failure.code

    @property
    def reason(self) -> str | None:
        return None if self.failure is None else self.failure.reason

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def finish(self) -> str | None:
        """Name of the finish reason without its prefix."""
        if not self.deltas or not self.deltas[-1].HasField("finish"):
            return None
        name = inference_pb2.FinishReason.Name(self.deltas[-1].finish.reason)
        return name.removeprefix("FINISH_REASON_")

    def check(self) -> None:
        """The order that the contract promises for a stream that ended with OK."""
        assert self.failure is None, self.failure
        assert self.started is not None
        assert self.completed is not None
        index = 0
        for delta in self.deltas:
            assert delta.first_token_index == index, (delta, index)
            index += delta.token_count
        assert [delta.HasField("finish") for delta in self.deltas].count(True) == 1
        assert self.finish is not None, "the finish does not stand in the last delta"
        assert self.completed.usage.completion_tokens == index


@dataclass(frozen=True, slots=True)
class Gateway:
    """The connections to one gateway, and their stubs."""

    channel: grpc.aio.Channel
    admin_channel: grpc.aio.Channel
    inference: InferenceServiceAsyncStub
    admin: AdminServiceAsyncStub


@asynccontextmanager
async def connect(address: str, admin_address: str) -> AsyncIterator[Gateway]:
    async with (
        grpc.aio.insecure_channel(address) as channel,
        grpc.aio.insecure_channel(admin_address) as admin_channel,
    ):
        yield Gateway(
            channel,
            admin_channel,
            cast("InferenceServiceAsyncStub", InferenceServiceStub(channel)),
            cast("AdminServiceAsyncStub", AdminServiceStub(admin_channel)),
        )


def request_of(
    prompt: str | Sequence[int], max_new_tokens: int, *, request_id: str = "", ends: bool = False
) -> inference_pb2.GenerateRequest:
    """Greedy, with ids in the answer; stops at end tokens only if `ends`."""
    request = inference_pb2.GenerateRequest(
        request_id=request_id,
        sampling=inference_pb2.SamplingParams(temperature=0),
        stopping=inference_pb2.StoppingParams(max_new_tokens=max_new_tokens, ignore_eos=not ends),
        output=inference_pb2.OutputOptions(token_ids=True, flush_interval_ms=0),
    )
    if isinstance(prompt, str):
        request.prompt.text = prompt
    else:
        request.prompt.token_ids.ids.extend(prompt)
    return request


async def collect(
    call: grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse],
    flowing: asyncio.Event | None = None,
) -> Reply:
    """Reads a Generate to its end, however it ends; sets `flowing` at its first delta.

    Raises:
        asyncio.CancelledError: the call was cancelled on this side.
    """
    reply = Reply()
    try:
        async for response in call:
            match response.WhichOneof("event"):
                case "started":
                    assert reply.started is None
                    reply.started = response.started
                case "delta":
                    assert reply.started is not None
                    assert reply.completed is None
                    reply.deltas.append(response.delta)
                    if flowing is not None:
                        flowing.set()
                case "prompt":
                    assert not reply.deltas
                    reply.prompt_token_ids.extend(response.prompt.token_ids)
                case "completed":
                    assert reply.completed is None
                    reply.completed = response.completed
    except grpc.aio.AioRpcError as error:
        reply.failure = Failure.of(error)
    return reply


async def generate(gateway: Gateway, request: inference_pb2.GenerateRequest) -> Reply:
    """One request to its end."""
    return await collect(gateway.inference.Generate(request, timeout=CALL_LIMIT_S))


async def generate_all(
    gateway: Gateway, requests: Iterable[inference_pb2.GenerateRequest]
) -> list[Reply]:
    """All of them at once."""
    return await asyncio.gather(*(generate(gateway, request) for request in requests))


async def start_streams(
    gateway: Gateway, requests: Iterable[inference_pb2.GenerateRequest]
) -> list[asyncio.Task[Reply]]:
    """Starts them all; comes back when each has got its first delta."""
    flowing: list[asyncio.Event] = []
    readers: list[asyncio.Task[Reply]] = []
    for request in requests:
        flowing.append(asyncio.Event())
        call = gateway.inference.Generate(request, timeout=CALL_LIMIT_S)
        readers.append(asyncio.create_task(collect(call, flowing[-1])))
    await asyncio.gather(*(event.wait() for event in flowing))
    return readers


async def statistics_when(
    gateway: Gateway, wanted: Callable[[admin_pb2.Stats], bool]
) -> admin_pb2.Stats:
    """The first snapshot of the server's statistics that is as `wanted`."""
    watch = gateway.admin.WatchStats(
        admin_pb2.WatchStatsRequest(interval_ms=SNAPSHOT_INTERVAL_MS), timeout=CALL_LIMIT_S
    )
    last: admin_pb2.Stats | None = None
    try:
        async for response in watch:
            last = response.stats
            if wanted(last):
                return last
    except grpc.aio.AioRpcError as error:
        raise AssertionError(f"statistics never came to what was wanted; last: {last}") from error
    finally:
        watch.cancel()
    raise AssertionError(f"the statistics stream ended; last: {last}")


def blocks_active(statistics: admin_pb2.Stats) -> int:
    return sum(executor.kv_blocks_active for executor in statistics.executors)


def at_rest(statistics: admin_pb2.Stats) -> bool:
    """Nothing runs, waits, is open or holds a block."""
    return (
        statistics.running_requests == 0
        and statistics.queued_requests == 0
        and statistics.open_streams == 0
        and blocks_active(statistics) == 0
    )
