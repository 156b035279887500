"""Sends requests to a server and notes when what came back, in one event loop.

Owns the connections and the clock readings. Latencies of an open loop count from the moment at
which a request *should* have been sent, so that a generator (or a server) that falls behind does
not hide its own delay. No call is repeated: what a client library would try again is a failure
here. Knows nothing of percentiles. Called by `generator`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from array import array
from collections.abc import Iterator
from typing import Any, Final

import grpc
import grpc.aio

from gapless.bench.arrivals import Floats, Share
from gapless.client import errors
from gapless.client.channel import open_channel
from gapless.client.requests import generate_request
from gapless.client.values import Completed, Finish
from gapless.protos import inference_pb2, inference_pb2_grpc

TICK_S: Final = 0.01
"""How often the event loop's own lateness is looked at."""
CONNECT_TIMEOUT_S: Final = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class CallOptions:
    """How requests are made."""

    address: str
    channel_count: int
    flush_interval_ms: int | None
    text: bool
    timeout_s: float


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """One request as its client saw it. Times are CLOCK_MONOTONIC in seconds."""

    new_tokens: int
    """Asked for."""
    intended_s: float
    """When it should have been sent; in a closed loop, when it was."""
    sent_s: float
    ended_s: float = 0.0
    piece_s: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    """When each piece that brought tokens was there."""
    piece_tokens: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    """How many it brought."""
    failure: str | None = None
    """``CODE`` or ``CODE REASON``; None: all tokens came."""
    server_ttft_s: float = 0.0
    """What the gateway says of it: arrival to first delta handed to the transport."""
    device_s: float = 0.0
    """What the scheduler says: how long the device computed before its first token."""


class Caller:
    """The connections of one process."""

    def __init__(self, options: CallOptions) -> None:
        self._options = options
        self._channels = [
            open_channel(options.address, None, with_service_config=False, own_connection=True)
            for _ in range(options.channel_count)
        ]
        self._stubs: list[Any] = [
            inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels
        ]
        self._messages: list[inference_pb2.GenerateRequest] = []

    async def connect(self) -> None:
        """Returns when all connections stand.

        Raises:
            NoServerError: one does not.
        """
        ready = asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await ready
        except TimeoutError:
            text = f"nothing answers at {self._options.address}"
            raise errors.NoServerError(text, code="UNAVAILABLE") from None

    def prepare(self, share: Share) -> None:
        """Makes all messages, so that sending one is cheap."""
        options = self._options
        self._messages = [
            generate_request(
                None,
                None,
                request.prompt.tolist(),
                {
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "max_new_tokens": request.new_tokens,
                    "return_text": options.text,
                    "return_token_ids": not options.text,
                    "flush_interval_ms": options.flush_interval_ms,
                },
            )
            for request in share.requests
        ]

    async def run(self, share: Share, start_s: float) -> list[Record]:
        """Sends what was prepared, from `start_s` on; returns when the last has ended."""
        if share.arrivals_s is not None:
            return await self._open_loop(share, share.arrivals_s, start_s)
        records: list[Record] = []
        numbers = iter(range(len(share.requests)))
        stubs = itertools.cycle(self._stubs)
        await asyncio.gather(
            *(
                self._closed_loop(share, numbers, next(stubs), records, start_s + after_s)
                for after_s in share.starts_s
            )
        )
        return records

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _open_loop(self, share: Share, arrivals_s: Floats, start_s: float) -> list[Record]:
        records: list[Record] = []
        calls: list[asyncio.Task[None]] = []
        stubs = itertools.cycle(self._stubs)
        for number, after_s in enumerate(arrivals_s.tolist()):
            intended_s = start_s + after_s
            await _sleep_until(intended_s)
            record = Record(share.requests[number].new_tokens, intended_s, 0.0)
            records.append(record)
            calls.append(asyncio.create_task(self._call(number, record, next(stubs))))
        await asyncio.gather(*calls)
        return records

    async def _closed_loop(
        self,
        share: Share,
        numbers: Iterator[int],
        stub: Any,
        records: list[Record],
        start_s: float,
    ) -> None:
        await _sleep_until(start_s)
        for number in numbers:
            now_s = time.monotonic()
            record = Record(share.requests[number].new_tokens, now_s, now_s)
            records.append(record)
            await self._call(number, record, stub)

    async def _call(self, number: int, record: Record, stub: Any) -> None:
        message = self._messages[number]
        record.sent_s = time.monotonic()
        call = stub.Generate(message, timeout=self._options.timeout_s)
        try:
            await _read(call, record)
        except grpc.aio.AioRpcError as error:
            record.failure = failure_of(errors.from_call(error, received_any=True))
        record.ended_s = time.monotonic()


async def _read(call: Any, record: Record) -> None:
    """Reads a stream to its end."""
    finish: Finish | None = None
    token_count = 0
    while True:
        response = await call.read()
        if response is grpc.aio.EOF:
            break
        now_s = time.monotonic()
        event = response.WhichOneof("event")
        if event == "delta":
            delta = response.delta
            if delta.token_count:
                token_count += delta.token_count
                record.piece_s.append(now_s)
                record.piece_tokens.append(delta.token_count)
            if delta.HasField("finish"):
                finish = Finish.read(delta.finish)
        elif event == "completed":
            timing = Completed.read(response.completed).timing
            record.server_ttft_s = timing.time_to_first_token_s
            record.device_s = timing.device_s
    if token_count != record.new_tokens:
        record.failure = f"OK {'no finish' if finish is None else finish.reason.value}"


def failure_of(error: errors.GaplessError) -> str:
    """How a failure is counted: by code and, where the server gave one, reason."""
    return error.code if error.reason is None else f"{error.code} {error.reason}"


async def watch_lateness(lateness_s: array[float]) -> None:
    """Notes again and again how late the event loop wakes a task; until it is cancelled."""
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        lateness_s.append(time.monotonic() - due_s)


async def _sleep_until(moment_s: float) -> None:
    delay_s = moment_s - time.monotonic()
    if delay_s > 0:
        await asyncio.sleep(delay_s)
