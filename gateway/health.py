"""The standard health service: what balancers and clients watch.

Owns the serving status by service name. The empty name means the process and is SERVING while it
runs; `gapless.v1.InferenceService` follows "would a Generate be admitted". The server sets both.

This is written anew, and not grpcio-health-checking's own servicer, because that one forgets all
watchers of a name as soon as one of them leaves: the others never learn of a drain.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

INFERENCE_SERVICE: Final = "gapless.v1.InferenceService"
ADMIN_SERVICE: Final = "gapless.v1.AdminService"


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Check and Watch of grpc.health.v1. All calls on the event loop."""

    def __init__(self) -> None:
        self._serving = {"": True, INFERENCE_SERVICE: False}
        self._changed: dict[asyncio.Event, str] = {}
        self._closed = False

    def set_serving(self, service: str, serving: bool) -> None:
        """Changes a status; each of its watchers hears of it."""
        if self._serving.get(service) is serving:
            return
        self._serving[service] = serving
        for event in self.watching(service):
            event.set()

    def close(self) -> None:
        """Ends all Watch streams, so that a server that stops need not cut them."""
        self._closed = True
        for event in self._changed:
            event.set()

    def watching(self, service: str) -> list[asyncio.Event]:
        """The Watch streams of a name."""
        return [event for event, watched in self._changed.items() if watched == service]

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a name that nobody serves."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> None:
        """The status now and after each change; an unknown name is SERVICE_UNKNOWN and stays."""
        changed = asyncio.Event()
        self._changed[changed] = request.service
        sent = None
        try:
            while True:
                changed.clear()
                status = self._status(request.service)
                if status != sent:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    sent = status
                    continue
                if self._closed:
                    return
                await changed.wait()
        finally:
            del self._changed[changed]

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in self._serving:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if self._serving[service]:
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING
