"""The gateway's end of the conversation with the scheduler.

Owns the DEALER socket, what the scheduler last said of itself (state, facts, limits), and the
calls that wait for its answer. Knows nothing of requests: updates go to whoever is named at start.

The socket's descriptor is read on the event loop, without a task or a future a message: ZeroMQ's
descriptor is edge-triggered and becomes readable once, also for an edge that a send consumed, so
every send is followed by a look at what may have come meanwhile.

The scheduler is *lost* when its connection breaks or when nothing was heard for `silence_max_s`
(it sends a beat each second). That is said once, and final: the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from gapless.gateway.failures import Failure
from gapless.protos import rendezvous
from gapless.protos.messages import (
    Beat,
    CancelById,
    Cancelled,
    GatewayGoodbye,
    GatewayHello,
    GatewayWord,
    GetStats,
    SchedulerUpdate,
    ServerState,
    StateChanged,
    Stats,
    StatsReply,
    Update,
    Welcome,
)
from gapless.protos.reasons import Reason

ANSWER_TIMEOUT_S: Final = 5.0
"""A call that is not answered for so long fails."""
BACKLOG_WORDS_MAX: Final = 65_536
"""Words that may wait in the socket, each way; more means that the other side is stuck."""
READ_BATCH_WORDS_MAX: Final = 64
"""Words read before the event loop gets its turn."""
GOODBYE_LINGER_MS: Final = 500

_LOG = logging.getLogger("gapless.gateway")


class Link:
    """The conversation. All calls on the event loop."""

    def __init__(
        self,
        run_folder: Path,
        hello: GatewayHello,
        *,
        on_update: Callable[[Update], None],
        on_state: Callable[[ServerState], None],
        on_welcome: Callable[[Welcome], None],
        on_lost: Callable[[str], None],
        silence_max_s: float,
    ) -> None:
        self.state = ServerState.STARTING
        self.welcome: Welcome | None = None
        self._endpoint = rendezvous.gateways_endpoint(run_folder)
        self._hello = hello
        self._on_update = on_update
        self._on_state = on_state
        self._on_welcome = on_welcome
        self._on_lost = on_lost
        self._silence_max_s = silence_max_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SchedulerUpdate)
        self._answers: dict[int, asyncio.Future[object]] = {}
        self._next_call = 0
        self._heard_s: float | None = None
        self._look_due = False
        self._started = False
        self.is_lost = False
        """The scheduler was there and is gone: nothing goes out any more."""
        self._ended = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.sndhwm = BACKLOG_WORDS_MAX
        self._socket.rcvhwm = BACKLOG_WORDS_MAX
        self._socket.linger = GOODBYE_LINGER_MS
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._watch: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Connects and greets. The scheduler need not be there yet."""
        self._started = True
        loop = asyncio.get_running_loop()
        self._socket.connect(self._endpoint)
        loop.add_reader(self._socket.fileno(), self._look)
        loop.add_reader(self._monitor.fileno(), self._look_at_connection)
        self._watch = loop.call_later(self._silence_max_s / 10, self._check_silence)
        self.send(self._hello)
        self._look_at_connection()

    def send(self, word: GatewayWord) -> None:
        """Hands a word to the socket; never waits. After the end it is dropped."""
        if self._ended:
            return
        try:
            self._socket.send(self._encoder.encode(word), zmq.NOBLOCK)
        except zmq.Again:
            self._lose(f"{BACKLOG_WORDS_MAX} words wait for it")
            return
        if not self._look_due:
            self._look_due = True
            asyncio.get_running_loop().call_soon(self._look)

    async def cancel_by_id(self, tenant: str, request_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Ends live requests at whichever gateway; returns those that were live.

        Raises Failure: the scheduler is lost or does not answer.
        """
        call = self._draw_call()
        answer = await self._ask(call, CancelById(call, tenant, request_ids))
        assert isinstance(answer, Cancelled), answer
        return answer.request_ids

    async def stats(self) -> Stats:
        """A snapshot of the scheduler. Raises Failure as `cancel_by_id`."""
        call = self._draw_call()
        answer = await self._ask(call, GetStats(call))
        assert isinstance(answer, StatsReply), answer
        return answer.stats

    def close(self) -> None:
        """Says goodbye if the scheduler is still there, and gives the sockets back."""
        if self._started:
            self.send(GatewayGoodbye())
        self._end()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()

    # -------------------------------------------------------------- calls

    def _draw_call(self) -> int:
        self._next_call += 1
        return self._next_call

    async def _ask(self, call: int, word: CancelById | GetStats) -> object:
        if self._ended:
            raise scheduler_lost()
        if self._heard_s is None:
            raise Failure(Reason.STARTING, "the scheduler is not there yet")
        answer = asyncio.get_running_loop().create_future()
        self._answers[call] = answer
        self.send(word)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise Failure(Reason.SCHEDULER_LOST, "the scheduler does not answer") from None
        finally:
            self._answers.pop(call, None)

    def _answer(self, call: int, word: object) -> None:
        answer = self._answers.get(call)
        if answer is not None and not answer.done():
            answer.set_result(word)

    # -------------------------------------------------------------- reading

    def _look(self) -> None:
        """Reads what is there; leaves the rest to the next turn of the loop after a batch."""
        self._look_due = False
        for _ in range(READ_BATCH_WORDS_MAX):
            if self._ended:
                return
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._dispatch(self._decoder.decode(data))
            except (msgspec.ValidationError, msgspec.DecodeError, AssertionError) as error:
                # One of the two sides is wrong about the other: no later word can be trusted.
                _LOG.exception("a word of the scheduler makes no sense")
                self._lose(f"a word of it makes no sense: {error}")
                return
        self._look_due = True
        asyncio.get_running_loop().call_soon(self._look)

    def _dispatch(self, word: SchedulerUpdate) -> None:
        self._heard_s = time.monotonic()
        match word:
            case Update():
                self._on_update(word)
            case Beat():
                pass
            case StateChanged(state):
                if state is not self.state:
                    _LOG.info("scheduler is %s", state.name)
                self.state = state
                self._on_state(state)
            case Welcome():
                self.welcome = word
                self._on_welcome(word)
            case Cancelled(call) | StatsReply(call):
                self._answer(call, word)

    # -------------------------------------------------------------- loss

    def _look_at_connection(self) -> None:
        """A broken connection is a loss; one that was never made is not."""
        while not self._ended:
            try:
                message = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if message["event"] == zmq.EVENT_DISCONNECTED:
                self._read_out()
                self._lose("its connection broke")

    def _read_out(self) -> None:
        """What it had said before it went still counts."""
        while not self._ended and self._has_words():
            self._look()

    def _has_words(self) -> bool:
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int), events
        return bool(events & zmq.POLLIN)

    def _check_silence(self) -> None:
        """If this process itself was stopped meanwhile, what came in waits: read it first."""
        self._read_out()
        if self._ended:
            return
        if self._heard_s is not None:
            silence_s = time.monotonic() - self._heard_s
            if silence_s > self._silence_max_s:
                self._lose(f"it said nothing for {silence_s:.1f} s")
                return
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(self._silence_max_s / 10, self._check_silence)

    def _lose(self, why: str) -> None:
        if self._ended:
            return
        _LOG.error("the scheduler is lost: %s", why)
        self.is_lost = True
        self._end()
        self._on_lost(why)

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        loop.remove_reader(self._monitor.fileno())
        if self._watch is not None:
            self._watch.cancel()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(scheduler_lost())


def scheduler_lost() -> Failure:
    """What ends when the scheduler is lost."""
    return Failure(Reason.SCHEDULER_LOST, "the scheduler was lost")
