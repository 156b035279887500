"""The public client: one object, one server address (or a name with several servers behind it).

Owns the channels. Called by applications and by the `gapless` command. Turns every failed call
into one of ``gapless.client.errors``; must not know how a server is built.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gapless.client import errors, requests
from gapless.client.channel import SERVICE, open_channel
from gapless.client.stream import GenerateCall, Generation
from gapless.client.values import HealthStatus, ModelInfo, ServerStats, Tokenization
from gapless.protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

_Answer = TypeVar("_Answer")


class Client:
    """Calls of the public API.

    ::

        async with Client("localhost:50051") as client:
            async for delta in client.generate("Once upon a time", temperature=0.7):
                print(delta.text, end="", flush=True)

    Args:
        address: ``host:port`` or a gRPC target such as ``dns:///gateway:50051``.
        admin_address: of the admin service, for `stats` and `watch_stats`; None if not needed.
        credentials: of TLS; None for an unencrypted connection.
        timeout_s: deadline of each call in seconds; None = no deadline. `generate` and the other
            calls take their own.

    Every call raises `GaplessError` if it fails.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        admin_address: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._channel = open_channel(address, credentials, with_service_config=True)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        # Health and cancel must get through to a server that is starting or draining.
        self._control_channel = open_channel(address, credentials, with_service_config=False)
        self._control = inference_pb2_grpc.InferenceServiceStub(self._control_channel)
        self._health = health_pb2_grpc.HealthStub(self._control_channel)
        self._admin_channel: grpc.aio.Channel | None = None
        if admin_address is not None:
            self._admin_channel = open_channel(
                admin_address, credentials, with_service_config=False
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections; streams still open are cancelled."""
        await self._channel.close()
        await self._control_channel.close()
        if self._admin_channel is not None:
            await self._admin_channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[requests.GenerateOptions],
    ) -> Generation:
        """Starts a generation when its first delta is asked for.

        Args:
            prompt: raw text; or
            messages: a conversation for the model's chat template, each a mapping with ``role``
                and ``content`` (and further fields of `ChatMessage`); or
            token_ids: the prompt as token ids. Exactly one of the three.
            timeout_s: deadline of the whole stream, in seconds.
            **options: see `GenerateOptions`.

        Raises:
            TypeError: not exactly one prompt, an unknown option or a value of the wrong type.
            ValueError: a number that the message cannot hold.
        """
        request = requests.generate_request(prompt, messages, token_ids, options)

        def open_call() -> GenerateCall:
            call: GenerateCall = self._inference.Generate(request, timeout=self._timeout(timeout_s))
            return call

        return Generation(open_call)

    async def cancel(self, request_ids: str | Iterable[str], *, reason: str = "") -> list[str]:
        """Stops generations by id; their streams end with FinishReason.CANCELLED.

        Returns the ids that were live. Unknown ids are no error.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        request = inference_pb2.CancelGenerateRequest(request_ids=ids, reason=reason)
        answer = await self._answer(
            self._control.CancelGenerate(request, timeout=self._timeout(None))
        )
        return list(answer.cancelled_request_ids)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        model: str = "",
        return_token_ids: bool = True,
        return_offsets: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[requests.PromptOptions],
    ) -> Tokenization:
        """The tokens of a prompt as `generate` would see them; arguments as there."""
        request = inference_pb2.TokenizeRequest(
            model=model,
            prompt=requests.prompt_message(prompt, messages, None),
            return_token_ids=return_token_ids,
            return_offsets=return_offsets,
        )
        requests.set_options(request.prompt, requests.PROMPT_FIELDS, options)
        call = self._inference.Tokenize(request, timeout=self._timeout(timeout_s))
        return Tokenization.read(await self._answer(call))

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids; bytes that are no valid UTF-8 show as U+FFFD."""
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        call = self._inference.Detokenize(request, timeout=self._timeout(timeout_s))
        answer: inference_pb2.DetokenizeResponse = await self._answer(call)
        return answer.text

    async def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """All models that the server offers."""
        request = inference_pb2.ListModelsRequest()
        call = self._inference.ListModels(request, timeout=self._timeout(timeout_s))
        return [ModelInfo.read(model) for model in (await self._answer(call)).models]

    async def model(self, name: str = "", *, timeout_s: float | None = None) -> ModelInfo:
        """One model; without a name, the only one served."""
        request = inference_pb2.GetModelRequest(model=name)
        call = self._inference.GetModel(request, timeout=self._timeout(timeout_s))
        return ModelInfo.read((await self._answer(call)).model)

    async def health(
        self, service: str = SERVICE, *, timeout_s: float | None = None
    ) -> HealthStatus:
        """Whether the server admits requests now; a service it does not know is SERVICE_UNKNOWN."""
        request = health_pb2.HealthCheckRequest(service=service)
        call = self._health.Check(request, timeout=self._timeout(timeout_s))
        try:
            answer = await self._answer(call)
        except errors.RefusedError as error:
            if error.code != "NOT_FOUND":
                raise
            return HealthStatus.SERVICE_UNKNOWN
        return HealthStatus(answer.status)

    async def watch_health(self, service: str = SERVICE) -> AsyncGenerator[HealthStatus, None]:
        """The health now and at each change, until the loop is left."""
        call = self._health.Watch(health_pb2.HealthCheckRequest(service=service))
        received_any = False
        try:
            async for answer in call:
                received_any = True
                yield HealthStatus(answer.status)
        except grpc.aio.AioRpcError as error:
            raise errors.from_call(error, received_any=received_any) from None
        finally:
            call.cancel()

    async def stats(self, *, timeout_s: float | None = None) -> ServerStats:
        """A snapshot of queues, blocks and totals, from the admin address.

        Raises:
            ValueError: the client was made without `admin_address`.
        """
        call = self._admin("stats").GetStats(
            admin_pb2.GetStatsRequest(), timeout=self._timeout(timeout_s)
        )
        return ServerStats.read((await self._answer(call)).stats)

    async def watch_stats(self, interval_s: float = 1.0) -> AsyncGenerator[ServerStats, None]:
        """A snapshot now and at each interval, until the loop is left.

        Raises:
            ValueError: the client was made without `admin_address`.
        """
        request = admin_pb2.WatchStatsRequest(interval_ms=round(1000 * interval_s))
        call = self._admin("watch_stats").WatchStats(request)
        received_any = False
        try:
            async for answer in call:
                received_any = True
                yield ServerStats.read(answer.stats)
        except grpc.aio.AioRpcError as error:
            raise errors.from_call(error, received_any=received_any) from None
        finally:
            call.cancel()

    def _admin(self, method: str) -> admin_pb2_grpc.AdminServiceAsyncStub:
        if self._admin_channel is None:
            raise ValueError(f"{method} needs Client(..., admin_address=...)")
        stub: Any = admin_pb2_grpc.AdminServiceStub(self._admin_channel)
        return stub  # type: ignore[no-any-return]

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    async def _answer(self, call: Awaitable[_Answer]) -> _Answer:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise errors.from_call(error) from None
