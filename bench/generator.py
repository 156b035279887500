"""The processes that make the load: each drives its share, all start at one moment.

Owns the processes and what they say to each other::

    parent ── share ──▶ child: connects, makes its messages ── None ──▶ parent
    parent ── the moment to start ──▶ child: sends, reads ── Driven ──▶ parent

A failure travels back in place of what was expected. Knows nothing of percentiles. Called by
`load`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import multiprocessing
import signal
import time
from array import array
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from gapless.bench.arrivals import Share
from gapless.bench.calls import Caller, CallOptions, Record, watch_lateness
from gapless.client.errors import GaplessError

START_DELAY_S: Final = 0.2
"""From the last child's readiness to the first request."""


@dataclasses.dataclass(frozen=True, slots=True)
class Driven:
    """What one process has measured."""

    records: list[Record]
    lateness_s: array[float]
    """How late its event loop woke a task that was due, at regular moments."""
    cpu_s: float
    seconds: float


class GeneratorError(Exception):
    """A process of the generator ended by itself."""


def drive(
    options: CallOptions, shares: Sequence[Share], before_start: Callable[[], None]
) -> list[Driven]:
    """Makes the load; `before_start` is called when all are ready.

    Raises:
        GaplessError: the server cannot be reached.
        GeneratorError: a process of the generator ended.
    """
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        ends: list[Connection[Any, Any]] = []
        for share in shares:
            ours, theirs = context.Pipe()
            child = context.Process(target=_child, args=(theirs, options, share), daemon=True)
            child.start()
            theirs.close()
            stack.callback(child.join)
            stack.callback(child.terminate)
            stack.callback(ours.close)
            ends.append(ours)
        for end in ends:
            _receive(end)
        before_start()
        start_s = time.monotonic() + START_DELAY_S
        for end in ends:
            end.send(start_s)
        return [_receive(end) for end in ends]


def _receive(end: Connection[Any, Any]) -> Any:
    try:
        word = end.recv()
    except EOFError:
        raise GeneratorError("a process of the generator ended by itself") from None
    if isinstance(word, _Failure):
        raise word.error()
    return word


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    """A `GaplessError` in a form that can be sent."""

    kind: type[GaplessError]
    text: str
    code: str

    def error(self) -> GaplessError:
        return self.kind(self.text, code=self.code)


def _child(end: Connection[Any, Any], options: CallOptions, share: Share) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    try:
        end.send(asyncio.run(_drive(end, options, share)))
    except GaplessError as error:
        end.send(_Failure(type(error), str(error), error.code))


async def _drive(end: Connection[Any, Any], options: CallOptions, share: Share) -> Driven:
    caller = Caller(options)
    try:
        await caller.connect()
        caller.prepare(share)
        gc.collect()
        gc.freeze()  # so that no later collection walks the messages
        end.send(None)
        start_s: float = await asyncio.to_thread(end.recv)
        lateness_s: array[float] = array("d")
        watch = asyncio.create_task(watch_lateness(lateness_s))
        cpu_s = time.process_time()
        records = await caller.run(share, start_s)
        driven = Driven(
            records, lateness_s, time.process_time() - cpu_s, time.monotonic() - start_s
        )
        watch.cancel()
        return driven
    finally:
        await caller.close()
