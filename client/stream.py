"""One generation as a stream of deltas.

Owns the call behind it: leaving the loop, by whatever way, cancels the call, and with it the
generation on the server. Gets the call from a function, so that a later version can open another
call for the same generation and attach at a cursor. Must not know channels.

::

    opened ──first event──▶ started ──deltas──▶ completed
       └──────────error, break, aclose──────────▶ closed
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Self, TypeAlias

import grpc

from gapless.client import errors
from gapless.client.values import Completed, Delta, Started
from gapless.protos import inference_pb2

GenerateCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"
)


class Generation:
    """Yields the deltas of one generation, once.

    ::

        stream = client.generate("Once upon a time")
        async for delta in stream:
            print(delta.text, end="")
        print(stream.completed.usage)

    Nothing is sent before the first delta is asked for. A ``break``, an exception and the
    cancellation of the task all cancel the generation; so does `aclose`, also from another task,
    in which case the loop just ends.

    Raises (from the loop and from `text`):
        GaplessError: the call failed; see ``gapless.client.errors``.
        RuntimeError: iterated a second time.
    """

    def __init__(self, open_call: Callable[[], GenerateCall]) -> None:
        self._open_call = open_call
        self._call: GenerateCall | None = None
        self._closed = False
        self._begun = False
        self._received_any = False
        self._started: Started | None = None
        self._completed: Completed | None = None
        self._texts: list[str] = []
        self._prompt_token_ids: list[int] = []

    @property
    def started(self) -> Started | None:
        """Set when the first delta arrives."""
        return self._started

    @property
    def completed(self) -> Completed | None:
        """Usage, timing and seed; set when the loop ends by itself."""
        return self._completed

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Ids of the prompt, if `return_prompt_token_ids`; complete at the first delta."""
        return tuple(self._prompt_token_ids)

    @property
    def received_text(self) -> str:
        """The text of candidate 0 so far."""
        return "".join(self._texts)

    async def text(self) -> str:
        """The whole text of candidate 0: reads the stream to its end unless that was done."""
        if not self._begun:
            async for _ in self:
                pass
        elif self._completed is None:
            raise RuntimeError("the stream was left before its end")
        return self.received_text

    async def aclose(self) -> None:
        """Cancels the generation unless it has ended; harmless afterwards."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def __aiter__(self) -> AsyncGenerator[Delta, None]:
        # A generator, because the event loop closes one whose consumer has left: that is how a
        # plain `break` reaches the finally below.
        if self._begun:
            raise RuntimeError("a stream can be iterated only once")
        self._begun = True
        if self._closed:
            return
        self._call = call = self._open_call()
        try:
            while True:
                response = await self._read(call)
                if response is None:
                    break
                delta = self._accept(response)
                if delta is not None:
                    yield delta
        finally:
            call.cancel()

    async def _read(self, call: GenerateCall) -> inference_pb2.GenerateResponse | None:
        """The next message; None after the last."""
        try:
            response = await call.read()
        except grpc.aio.AioRpcError as error:
            if self._closed:
                return None
            raise errors.from_call(error, received_any=self._received_any) from None
        except BaseException:
            # grpc.aio reports our own cancel in the form of a task's cancellation.
            if self._closed and call.cancelled():
                return None
            raise
        if isinstance(response, inference_pb2.GenerateResponse):
            self._received_any = True
            return response
        if self._completed is None and not self._closed:
            raise errors.BugError("the stream ended without `completed`", code="OK")
        return None

    def _accept(self, response: inference_pb2.GenerateResponse) -> Delta | None:
        """Takes in one event. Events that this client does not know are passed over."""
        event = response.WhichOneof("event")
        if event == "delta":
            delta = Delta.read(response.delta)
            if delta.candidate_index == 0:
                self._texts.append(delta.text)
            return delta
        if event == "started":
            self._started = Started.read(response.started)
        elif event == "prompt":
            self._prompt_token_ids.extend(response.prompt.token_ids)
        elif event == "completed":
            self._completed = Completed.read(response.completed)
        return None
