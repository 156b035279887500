"""One gateway, put together: what listens, what it is linked to, and how it stops.

::

    STARTING ──scheduler says so──▶ SERVING ──SIGTERM──▶ lame duck ──▶ draining ──▶ stopped
        │                              │                     (refuses)     (waits)
        └──────scheduler lost──────────┴──▶ streams fail with SCHEDULER_LOST ──▶ exit 3

Owns the ports and the order of starting and stopping. Must not know: rules, text, messages' fields.
Called by ``__main__`` and by tests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gapless.gateway.admin import AdminServicer
from gapless.gateway.boundary import Boundary
from gapless.gateway.channel import server_options
from gapless.gateway.config import Config
from gapless.gateway.generate import Generation
from gapless.gateway.health import ADMIN_SERVICE, INFERENCE_SERVICE, Health
from gapless.gateway.link import Link
from gapless.gateway.model import ServedModel
from gapless.gateway.preparation import Preparation
from gapless.gateway.servicer import InferenceServicer
from gapless.gateway.streams import Streams
from gapless.protos import admin_pb2_grpc, inference_pb2_grpc
from gapless.protos.messages import CancelCause, GatewayHello, ServerState, Welcome

EXIT_OK: Final = 0
EXIT_MODEL_DIFFERS: Final = 1
EXIT_SCHEDULER_LOST: Final = 3
EXIT_FORCED: Final = 130

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
SLOW_CHECK_PERIOD_S: Final = 1.0
CANCELLED_STREAMS_WAIT_S: Final = 5.0
"""How long cancelled streams have to bring their last messages."""
QUIET_S: Final = 0.05
LAST_CALLS_S: Final = 1.0
"""A server is stopped when no call has come for the one time, at the latest after the other: gRPC
hands calls over one by one, and ends those that it still has with CANCELLED, which nobody tries
again."""

_LOG = logging.getLogger("gapless.gateway")


class Gateway:
    """See the module. Built, started, run and closed on one event loop."""

    def __init__(self, config: Config, model: ServedModel) -> None:
        self._config = config
        self._model = model
        hello = GatewayHello(model.revision, model.tokenizer.token_bytes.message())
        self.link = Link(
            config.run_folder,
            hello,
            on_update=lambda update: self.streams.apply(update, time.monotonic()),
            on_state=self._take_state,
            on_welcome=self._take_welcome,
            on_lost=self._take_loss,
            silence_max_s=config.silence_max_s,
        )
        self.streams = Streams(self.link.send, config.slow_consumer_s)
        self.health = Health()
        self._preparation = Preparation(
            model, threads=config.threads, preparing_max=config.preparing_max
        )
        self._generation = Generation(config, model, self.link, self.streams, self._preparation)
        self._admin = AdminServicer(self.link, self.streams)
        self._boundary = Boundary()
        self._servers: list[Any] = []
        self._asked_to_stop = False
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._exit_code = EXIT_OK
        self.addresses: list[str] = []
        """Where it listens: the public port, then the admin port if there is one."""

    # -------------------------------------------------------------- life

    async def start(self) -> None:
        """Binds the ports, serves them, and greets the scheduler. Raises OSError: port taken."""
        public = self._new_server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(
                self._config, self._model, self.link, self._generation, self._preparation
            ),
            public,
        )
        self._bind(public, self._config.listen, INFERENCE_SERVICE)
        if self._config.admin_listen is not None:
            admin = self._new_server()
            admin_pb2_grpc.add_AdminServiceServicer_to_server(self._admin, admin)
            self._bind(admin, self._config.admin_listen, ADMIN_SERVICE)
        for server in self._servers:
            await server.start()
        self.link.start()

    def stop(self) -> None:
        """Asks for a drain; asked again, for an end at once.

        One that ends by itself, as the scheduler is lost, is then asked by the supervisor for the
        first time: its streams may still tell what happened.
        """
        if self._asked_to_stop:
            self.force()
        else:
            _LOG.info("draining: %d streams are live", len(self.streams))
            self._asked_to_stop = True
            self._stop.set()

    def force(self) -> None:
        """Asks for an end at once."""
        self._exit_code = self._exit_code or EXIT_FORCED
        self._stop.set()
        self._force.set()

    async def run(self) -> int:
        """Serves until it is asked to stop, drains, and returns the exit code."""
        slow = asyncio.create_task(self._watch_slow_clients())
        try:
            stopping = asyncio.create_task(self._stop.wait())
            done, _ = await asyncio.wait({stopping, slow}, return_when=asyncio.FIRST_COMPLETED)
            if slow in done:
                slow.result()  # it never ends but by a fault of ours
            drained = asyncio.create_task(self._drain())
            forced = asyncio.create_task(self._force.wait())
            done, _ = await asyncio.wait({drained, forced}, return_when=asyncio.FIRST_COMPLETED)
            if drained in done:
                drained.result()
            for task in (drained, forced):
                task.cancel()
        finally:
            slow.cancel()
            await self.close()
        return self._exit_code

    async def close(self) -> None:
        """Stops the servers and says goodbye; live calls get `stop_grace_s`, none if forced."""
        self.health.close()
        self._admin.close()
        grace_s = 0.0 if self._force.is_set() else self._config.stop_grace_s
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        self.link.close()
        self._preparation.close()

    # -------------------------------------------------------------- stopping

    async def _drain(self) -> None:
        """SIGTERM's order: refuse visibly, wait for what runs, cancel the rest."""
        self._generation.draining = True
        self._follow_admission()
        if self._exit_code == EXIT_OK:
            await asyncio.sleep(self._config.lame_duck_s)
            await self._wait_idle(self._config.drain_timeout_s)
            if len(self.streams):
                _LOG.warning("drain timeout: %d streams are cancelled", len(self.streams))
                self.streams.cancel_all(CancelCause.DRAIN)
        await self._wait_idle(CANCELLED_STREAMS_WAIT_S)
        await self._wait_quiet()

    async def _wait_idle(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.streams.wait_idle()
        except TimeoutError:
            return

    async def _wait_quiet(self) -> None:
        """Returns when no call comes any more."""
        until_s = time.monotonic() + LAST_CALLS_S
        seen = -1
        while seen != self._boundary.call_count and time.monotonic() < until_s:
            seen = self._boundary.call_count
            await asyncio.sleep(QUIET_S)

    # -------------------------------------------------------------- what the scheduler says

    def _take_state(self, _state: ServerState) -> None:
        self._follow_admission()

    def _take_welcome(self, welcome: Welcome) -> None:
        if welcome.facts.revision != self._model.revision:
            _LOG.error(
                "the executor serves revision %s of the model, this gateway has %s",
                welcome.facts.revision,
                self._model.revision,
            )
            self._end_with(EXIT_MODEL_DIFFERS)
        self._follow_admission()

    def _take_loss(self, _why: str) -> None:
        self._end_with(EXIT_SCHEDULER_LOST)
        self.health.set_serving("", False)
        self._follow_admission()
        self.streams.lose()

    def _end_with(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._generation.draining = True
        self._stop.set()

    def _follow_admission(self) -> None:
        """The service's health is "would a Generate be admitted"."""
        self.health.set_serving(INFERENCE_SERVICE, self._generation.refusal() is None)

    async def _watch_slow_clients(self) -> None:
        while True:
            await asyncio.sleep(SLOW_CHECK_PERIOD_S)
            self.streams.end_slow()

    # -------------------------------------------------------------- ports

    def _new_server(self) -> Any:
        options = server_options(
            deadline_max_s=self._config.deadline_max_s, reuse_port=self._config.reuse_port
        )
        server = grpc.aio.server(interceptors=(self._boundary,), options=options)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self._servers.append(server)
        return server

    def _bind(self, server: Any, address: str, service: str) -> None:
        reflection.enable_server_reflection(
            (service, HEALTH_SERVICE, reflection.SERVICE_NAME), server
        )
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        host, _, _ = address.rpartition(":")
        self.addresses.append(f"{host}:{port}")
