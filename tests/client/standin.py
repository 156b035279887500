"""A stand-in gateway: a real grpc.aio server on a free port whose answers a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_status import rpc_status

from gapless.client.channel import SERVICE
from gapless.gateway.channel import server_options
from gapless.protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from gapless.protos.reasons import ERROR_DOMAIN, TABLE, Reason

Events = AsyncIterator[inference_pb2.GenerateResponse | bytes]
Script = Callable[[inference_pb2.GenerateRequest, Any], Events]


def started(request_id: str = "r-1", prompt_tokens: int = 3) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        started=inference_pb2.GenerationStarted(
            request_id=request_id, model="standin", prompt_tokens=prompt_tokens
        )
    )


def delta(text: str, first: int, count: int = 1, **extra: Any) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        delta=inference_pb2.GenerationDelta(
            text=text, first_token_index=first, token_count=count, **extra
        )
    )


def last(text: str, first: int, reason: str = "STOP_TOKEN") -> inference_pb2.GenerateResponse:
    number = inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
    return delta(text, first, finish=inference_pb2.CandidateFinish(reason=number))


def completed(completion_tokens: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        completed=inference_pb2.GenerationCompleted(
            usage=inference_pb2.Usage(prompt_tokens=3, completion_tokens=completion_tokens),
            timing=inference_pb2.Timing(
                time_to_first_token=duration_pb2.Duration(nanos=250_000_000),
                decode_duration=duration_pb2.Duration(seconds=2),
            ),
            seed=2**63 + 1,
        )
    )


async def hello(request: inference_pb2.GenerateRequest, context: Any) -> Events:
    """The plain answer: four tokens."""
    yield started(request.request_id or "r-1")
    yield delta("Hel", 0)
    yield delta("lo", 1, count=2)
    yield last("!", 3)
    yield completed(4)


async def refuse(context: Any, reason: Reason, *details: Any, **metadata: str) -> None:
    """Aborts the call the way the gateway does."""
    info = error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=metadata)
    status = status_pb2.Status(
        code=grpc.StatusCode[TABLE[reason].code].value[0], message=f"because of {reason}"
    )
    for detail in (info, *details):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    grpc_status = rpc_status.to_status(status)
    await context.abort(grpc_status.code, grpc_status.details, grpc_status.trailing_metadata)


def stats_after(seconds: int) -> admin_pb2.Stats:
    """Two executors: in the first second one has bubbles, the other no request for half of it."""

    def duration(ms: int) -> duration_pb2.Duration:
        return duration_pb2.Duration(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)

    busy = admin_pb2.ExecutorStats(
        kv_blocks_active=2,
        kv_blocks_free=3,
        device_active=duration(1000 * seconds - 100),
        device_gaps=admin_pb2.DeviceGaps(
            scheduler=duration(60), border_and_upload=duration(30), launch=duration(10)
        ),
        bubble_histogram=admin_pb2.BubbleHistogram(
            upper_bounds_us=[10, 100], counts=[100 * seconds, 0, 2]
        ),
    )
    calm = admin_pb2.ExecutorStats(
        kv_blocks_active=5,
        kv_blocks_free=8,
        device_active=duration(1000 * seconds - 500),
        device_gaps=admin_pb2.DeviceGaps(no_request=duration(500)),
        bubble_histogram=admin_pb2.BubbleHistogram(upper_bounds_us=[10, 100], counts=[0, 0, 0]),
        step_histogram=admin_pb2.StepHistogram(upper_bounds_us=[7], token_counts=[30, 4]),
    )
    return admin_pb2.Stats(
        state=admin_pb2.SERVER_STATE_SERVING,
        running_requests=7,
        executors=[busy, calm],
    )


class StandinAdmin(admin_pb2_grpc.AdminServiceServicer):
    """The admin service as far as the client calls it."""

    async def GetStats(self, request: Any, context: Any) -> Any:  # noqa: N802
        return admin_pb2.GetStatsResponse(stats=stats_after(1))

    async def WatchStats(self, request: Any, context: Any) -> Any:  # noqa: N802
        for seconds in (1, 2, 3):
            yield admin_pb2.WatchStatsResponse(stats=stats_after(seconds))

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)

    Undrain = FlushPrefixCache = GetServerInfo
    Drain: Any = GetServerInfo


@dataclass
class Standin(inference_pb2_grpc.InferenceServiceServicer):
    """Scripts in, observations out."""

    script: Script = hello
    before: Callable[[Any], Awaitable[None]] | None = None
    """Called first by every unary call."""
    address: str = ""
    health: health_aio.HealthServicer = field(default_factory=health_aio.HealthServicer)
    requests: list[Any] = field(default_factory=list)
    calls_cancelled: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released each time a Generate call is cancelled from outside."""

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> None:
        # Writes, and is no generator: gRPC does not tell a generator of a cancellation that comes
        # while its last message is being written.
        self.requests.append(request)
        try:
            async for event in self.script(request, context):
                await context.write(event)
        except (asyncio.CancelledError, grpc.aio.InternalError):
            # The latter from a write that found the call gone already.
            self.calls_cancelled.release()
            raise

    async def answer(self, request: Any, context: Any, response: Any) -> Any:
        self.requests.append(request)
        if self.before is not None:
            await self.before(context)
        return response

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        response = inference_pb2.TokenizeResponse(
            token_count=2,
            token_ids=[5, 6],
            rendered_text=request.prompt.text,
            start_bytes=[0, 2],
            end_bytes=[2, 4],
        )
        return await self.answer(request, context, response)

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        text = " ".join(str(token) for token in request.token_ids)
        return await self.answer(request, context, inference_pb2.DetokenizeResponse(text=text))

    async def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self.answer(
            request, context, inference_pb2.GetModelResponse(model=self.model())
        )

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        response = inference_pb2.ListModelsResponse(models=[self.model()])
        return await self.answer(request, context, response)

    async def CancelGenerate(self, request: Any, context: Any) -> Any:  # noqa: N802
        response = inference_pb2.CancelGenerateResponse(
            cancelled_request_ids=request.request_ids[:1]
        )
        return await self.answer(request, context, response)

    @staticmethod
    def model() -> inference_pb2.Model:
        return inference_pb2.Model(
            name="standin",
            context_length=128,
            vocab_size=100,
            eos_token_ids=[2, 3],
            default_sampling=inference_pb2.SamplingParams(top_k=40),
        )

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self.health.set(SERVICE, status.SERVING if serving else status.NOT_SERVING)


@asynccontextmanager
async def standin_server(
    script: Script = hello, *, serving: bool | None = True
) -> AsyncIterator[Standin]:
    """A running stand-in; `serving=None` leaves the health service out."""
    server = grpc.aio.server(options=server_options(deadline_max_s=3600.0, reuse_port=False))
    standin = Standin(script)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(standin, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(StandinAdmin(), server)
    if serving is not None:
        health_pb2_grpc.add_HealthServicer_to_server(standin.health, server)
        await standin.set_serving(serving)
    standin.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield standin
    finally:
        await server.stop(0)
