"""The live streams of this gateway: each with the log of its tokens and who waits for it.

::

      Submit ──▶ waiting ──PrefillStarted──▶ prefilling ──Finished──▶ finished
                    │                            │
                    └──────────Failed────────────┴──────────────────▶ failed

Owns the map handle → stream and the logs. `Streams.apply` is the hot path: one call per message of
the scheduler, a dictionary look-up and an append a token, at most one wake-up a stream. A stream
takes its tokens when its client can take them; what waits meanwhile is its log, which is bounded by
max_new_tokens, and nothing else.

First tokens and ends are told at once, later tokens in `Turns`: a step brings a token to every
stream, and what their writes take together is milliseconds, in which nothing else would happen.
Within the flush interval tokens wait for the next ones: a delta goes out with the first update
after the interval. If none comes a timer sends what waits, after the interval once more.

Must not know: text, gRPC, validation. Written by the link, read by the task of each stream.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from gapless.gateway.link import scheduler_lost
from gapless.protos.messages import (
    Admitted,
    Cancel,
    CancelCause,
    Failed,
    Finished,
    GatewayWord,
    Handle,
    PrefillStarted,
    Submit,
    Update,
)

WAKES_PER_TURN: Final = 2
"""Streams that one turn of the event loop wakes. Of 1, 2, 4 and 8 this one had short waits for a
first token at no more CPU a token than waking all at once."""


class Turns:
    """Streams with something to send, woken a few in each turn of the event loop.

    A request that comes, and a first token, so waits for the writes of a few streams, and not for
    those of all.
    """

    __slots__ = ("_due", "_loop")

    def __init__(self) -> None:
        self._due: deque[Stream] = deque()
        self._loop = asyncio.get_running_loop()

    def add(self, stream: Stream) -> None:
        """Its turn comes after those who are here already."""
        if not self._due:
            self._loop.call_soon(self._wake)
        self._due.append(stream)

    def _wake(self) -> None:
        due = self._due
        for _ in range(min(WAKES_PER_TURN, len(due))):
            due.popleft().wake()
        if due:
            self._loop.call_soon(self._wake)


class Stream:
    """One candidate's way from its submission to its end. One task waits on it at a time."""

    __slots__ = (
        "_came_s",
        "_due_s",
        "_flush_interval_s",
        "_in_turns",
        "_loop",
        "_timer",
        "_turns",
        "_waiter",
        "finished",
        "handle",
        "lost",
        "prefilling",
        "refused",
        "taken",
        "task",
        "tokens",
        "tokens_max",
        "too_slow",
        "write_since_s",
    )

    def __init__(
        self, handle: Handle, tokens_max: int, flush_interval_s: float, turns: Turns
    ) -> None:
        self.handle = handle
        self.tokens = array("i")
        self.tokens_max = tokens_max
        self.taken = 0
        """Tokens of the log that its task has taken."""
        self.prefilling = False
        """It has left the queue: its first step is planned."""
        self.finished: Finished | None = None
        self.refused: Failed | None = None
        self.lost = False
        self.task = asyncio.current_task()
        self.write_since_s: float | None = None
        """Since when a write waits for the client; None if none does."""
        self.too_slow = False
        self._flush_interval_s = flush_interval_s
        self._came_s = 0.0
        """When its newest token came."""
        self._due_s = 0.0
        self._turns = turns
        self._in_turns = False
        # Kept, as asking for it costs a system call on Python 3.11.
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.finished is not None or self.refused is not None or self.lost

    async def wait_prefilling(self) -> None:
        """Returns once the request has left the queue, or has ended there."""
        while not self.prefilling and not self.tokens and not self.ended:
            await self._wait()

    async def wait_due(self) -> None:
        """Returns when there is something to send now: the end, or tokens not too soon."""
        waits = len(self.tokens) > self.taken and not self.ended
        if waits and time.monotonic() < self._due_s:
            self._set_timer()
            await self._wait()
        while len(self.tokens) == self.taken and not self.ended:
            await self._wait()

    def take(self, tokens_max: int) -> Sequence[int]:
        """The tokens that came since, at most `tokens_max`. The next ones are due in a while."""
        tokens = self.tokens[self.taken : self.taken + tokens_max]
        self.taken += len(tokens)
        self._due_s = self._came_s + self._flush_interval_s
        return tokens

    def wake(self) -> None:
        """Lets the waiting task look again."""
        self.close()
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def wake_when_due(self, now_s: float) -> None:
        """A token came: the same, in its turn and if a delta may go; at once for the first."""
        self._came_s = now_s
        if self._waiter is None or self._in_turns:
            return
        if not self.taken:
            self.wake()
        elif now_s >= self._due_s:
            self._take_turn()
        else:
            self._set_timer()

    def close(self) -> None:
        """No timer runs for it any more."""
        self._in_turns = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take_turn(self) -> None:
        self.close()  # or the timer would give it a second turn
        self._in_turns = True
        self._turns.add(self)

    def _set_timer(self) -> None:
        """For when no further token comes."""
        if self._timer is None:
            wait_s = self._due_s + self._flush_interval_s - time.monotonic()
            self._timer = self._loop.call_later(max(0.0, wait_s), self._take_turn)

    def _wait(self) -> asyncio.Future[None]:
        """Done at the next `wake`."""
        assert self._waiter is None, "one task waits for a stream at a time"
        self._waiter = self._loop.create_future()
        return self._waiter


class Streams:
    """All live streams. All calls on the event loop."""

    def __init__(self, send: Callable[[GatewayWord], None], slow_consumer_s: float) -> None:
        self._send = send
        self._slow_consumer_s = slow_consumer_s
        self._live: dict[int, Stream] = {}
        self._next_handle = 0
        self._lost = False
        self._turns = Turns()
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._live.values())

    def draw_handle(self) -> Handle:
        """A number never used before."""
        self._next_handle += 1
        return Handle(self._next_handle)

    def open(self, submit: Submit, flush_interval_s: float) -> Stream:
        """Submits a request; its stream belongs to the current task. Raises Failure."""
        if self._lost:
            raise scheduler_lost()
        tokens_max = submit.stopping.max_new_tokens
        stream = Stream(submit.handle, tokens_max, flush_interval_s, self._turns)
        self._live[submit.handle] = stream
        self._idle.clear()
        self._send(submit)
        return stream

    def close(self, stream: Stream, cause: CancelCause) -> None:
        """Lets a stream go; if its sequence has not ended, the scheduler is told so at once."""
        stream.close()
        if self._live.pop(stream.handle, None) is None:
            return
        if not stream.ended:
            self._send(Cancel((stream.handle,), cause))
        if not self._live:
            self._idle.set()

    def apply(self, update: Update, now_s: float) -> None:
        """Fills the logs with what an update brings, then ends what ended. Cheap: see module."""
        live = self._live
        if update.handles:
            handles = np.frombuffer(update.handles, dtype="<i8").tolist()
            tokens = np.frombuffer(update.tokens, dtype="<i4").tolist()
            assert len(handles) == len(tokens), (len(handles), len(tokens))
            for handle, token in zip(handles, tokens, strict=True):
                stream = live.get(handle)
                if stream is not None:
                    log = stream.tokens
                    assert len(log) < stream.tokens_max, (handle, stream.tokens_max)
                    log.append(token)
                    stream.wake_when_due(now_s)
        for event in update.events:
            stream = live.get(event.handle)
            if stream is None:
                continue
            match event:
                case Admitted():
                    continue
                case PrefillStarted():
                    stream.prefilling = True
                case Finished():
                    stream.finished = event
                case Failed():
                    stream.refused = event
            stream.wake()

    def lose(self) -> None:
        """The scheduler is lost: every stream fails, and so does any later one."""
        self._lost = True
        for stream in self:
            stream.lost = not stream.ended
            stream.wake()

    def cancel_all(self, cause: CancelCause) -> None:
        """Asks the scheduler to end all that is live; the streams then finish by themselves."""
        handles = tuple(stream.handle for stream in self if not stream.ended)
        if handles:
            self._send(Cancel(handles, cause))

    async def wait_idle(self) -> None:
        """Returns when no stream is live."""
        await self._idle.wait()

    def end_slow(self) -> None:
        """Ends the streams whose client takes nothing. Called about once a second."""
        limit_s = time.monotonic() - self._slow_consumer_s
        for stream in list(self):
            since_s = stream.write_since_s
            if since_s is not None and since_s < limit_s and not stream.too_slow:
                stream.too_slow = True
                assert stream.task is not None, "a stream belongs to a task"
                stream.task.cancel()
