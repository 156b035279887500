"""The operators' service, on its own port: what the server is and how it does.

Drain, Undrain and FlushPrefixCache are not offered yet and answer UNIMPLEMENTED.

Must not know: requests. Called by grpc.aio, behind `boundary.Boundary`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from typing import Any, Final

from gapless.gateway.failures import Failure
from gapless.gateway.findings import Findings
from gapless.gateway.generate import require_welcome
from gapless.gateway.link import Link
from gapless.gateway.streams import Streams
from gapless.protos import admin_pb2, admin_pb2_grpc
from gapless.protos.bubbles import BUBBLE_BOUNDS_US, STEP_BOUNDS_US, DeviceTime
from gapless.protos.messages import ServerState, Stats
from gapless.protos.reasons import Reason

API_VERSION: Final = "v1.1"
EXECUTOR_ID: Final = "executor-0"
"""There is one; its name is the same for the server's whole life."""
INTERVAL_DEFAULT_MS: Final = 1000
INTERVAL_MIN_MS: Final = 100
INTERVAL_MAX_MS: Final = 60_000


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """gapless.v1.AdminService."""

    def __init__(self, link: Link, streams: Streams) -> None:
        self._link = link
        self._streams = streams
        self._start_time_ns = time.time_ns()
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Ends all WatchStats streams, so that a server that stops need not cut them."""
        self._closed.set()

    async def GetServerInfo(  # noqa: N802
        self, request: admin_pb2.GetServerInfoRequest, context: Any
    ) -> admin_pb2.GetServerInfoResponse:
        """Versions, limits and executors."""
        welcome = require_welcome(self._link)
        facts, limits = welcome.facts, welcome.limits
        response = admin_pb2.GetServerInfoResponse(
            version=importlib.metadata.version("gapless"),
            api_version=API_VERSION,
            instance_id=welcome.instance_id,
            max_running_requests=limits.running_max,
            max_queued_requests=limits.queued_max,
            max_queued_tokens=limits.queued_tokens_max,
        )
        response.start_time.FromNanoseconds(self._start_time_ns)
        response.executors.add(
            executor_id=EXECUTOR_ID,
            device=facts.device,
            kv_block_tokens=facts.block_tokens,
            kv_blocks_total=facts.block_count,
        )
        return response

    async def GetStats(  # noqa: N802
        self, request: admin_pb2.GetStatsRequest, context: Any
    ) -> admin_pb2.GetStatsResponse:
        """One snapshot."""
        return admin_pb2.GetStatsResponse(stats=await self._snapshot())

    async def WatchStats(  # type: ignore[override]  # noqa: N802
        self, request: admin_pb2.WatchStatsRequest, context: Any
    ) -> None:
        """A snapshot at each interval until the client goes away or the server stops."""
        interval_ms = request.interval_ms if request.HasField("interval_ms") else None
        if interval_ms is None:
            interval_ms = INTERVAL_DEFAULT_MS
        findings = Findings()
        findings.check_integer("interval_ms", interval_ms, INTERVAL_MIN_MS, INTERVAL_MAX_MS)
        findings.raise_first()
        while not self._closed.is_set():
            await context.write(admin_pb2.WatchStatsResponse(stats=await self._snapshot()))
            try:
                async with asyncio.timeout(interval_ms / 1000):
                    await self._closed.wait()
            except TimeoutError:
                continue

    async def Drain(  # type: ignore[override]  # noqa: N802
        self, request: admin_pb2.DrainRequest, context: Any
    ) -> None:
        """Not offered."""
        raise _not_offered("Drain")

    async def Undrain(  # noqa: N802
        self, request: admin_pb2.UndrainRequest, context: Any
    ) -> admin_pb2.UndrainResponse:
        """Not offered."""
        raise _not_offered("Undrain")

    async def FlushPrefixCache(  # noqa: N802
        self, request: admin_pb2.FlushPrefixCacheRequest, context: Any
    ) -> admin_pb2.FlushPrefixCacheResponse:
        """Not offered."""
        raise _not_offered("FlushPrefixCache")

    async def _snapshot(self) -> admin_pb2.Stats:
        return stats_message(await self._link.stats(), len(self._streams), time.time())


def _not_offered(method: str) -> Failure:
    return Failure(
        Reason.UNSUPPORTED_FEATURE, f"{method} is not offered here", metadata={"field": method}
    )


def stats_message(stats: Stats, open_streams: int, now_wall_s: float) -> admin_pb2.Stats:
    """The scheduler's snapshot in public form; `open_streams` is this gateway's own count."""
    message = admin_pb2.Stats(
        state=admin_pb2.ServerState.ValueType(stats.state.value),
        running_requests=stats.running_requests,
        queued_requests=stats.queued_requests,
        queued_uncached_tokens=stats.queued_tokens,
        open_streams=open_streams,
        requests_total=stats.requests_total,
        requests_rejected_total=stats.requests_rejected_total,
        requests_failed_total=stats.requests_failed_total,
        requests_cancelled_total=stats.requests_cancelled_total,
        prompt_tokens_total=stats.prompt_tokens_total,
        cached_prompt_tokens_total=stats.cached_prompt_tokens_total,
        generated_tokens_total=stats.generated_tokens_total,
        preemptions_total=stats.preemptions_total,
        generated_tokens_per_second=stats.generated_tokens_per_second,
    )
    message.time.FromNanoseconds(_ns(now_wall_s))
    message.oldest_queued_age.FromNanoseconds(_ns(stats.oldest_queued_s))
    executor = message.executors.add(
        executor_id=EXECUTOR_ID,
        healthy=stats.state in (ServerState.SERVING, ServerState.DRAINING),
        running_requests=stats.running_requests,
        kv_blocks_active=stats.blocks_active,
        kv_blocks_free=stats.blocks_free,
    )
    executor.mean_step_duration.FromNanoseconds(_ns(stats.mean_step_s))
    if stats.last_step_s > 0:
        executor.last_step_time.FromNanoseconds(_ns(now_wall_s - stats.last_step_s))
    _add_device_time(executor, stats.device_time)
    executor.step_histogram.upper_bounds_us.extend(STEP_BOUNDS_US)
    executor.step_histogram.token_counts.extend(stats.step_counts)
    return message


def _add_device_time(executor: admin_pb2.ExecutorStats, device_time: DeviceTime) -> None:
    executor.device_active.FromNanoseconds(device_time.active_ns)
    gaps = executor.device_gaps
    parts = (gaps.no_request, gaps.scheduler, gaps.border_and_upload, gaps.launch)
    for part, duration_ns in zip(parts, device_time.gap_ns, strict=True):
        part.FromNanoseconds(duration_ns)
    executor.bubble_histogram.upper_bounds_us.extend(BUBBLE_BOUNDS_US)
    executor.bubble_histogram.counts.extend(device_time.bubble_counts)


def _ns(duration_s: float) -> int:
    return round(duration_s * 1e9)
