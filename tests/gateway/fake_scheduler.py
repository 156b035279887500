"""A scheduler for tests of the gateway: a ROUTER socket that speaks the private messages.

Deterministic and driven by the test: by itself it only greets, admits (unless `admits` is false),
writes the output a test planned for it, and answers cancels and statistics.
"""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from gapless.protos import rendezvous
from gapless.protos.bubbles import DeviceTime
from gapless.protos.messages import (
    Admitted,
    Beat,
    Cancel,
    CancelById,
    CancelCause,
    Cancelled,
    Event,
    Failed,
    Finished,
    FinishReason,
    GatewayGoodbye,
    GatewayHello,
    GatewayWord,
    GetStats,
    Limits,
    ModelFacts,
    SchedulerUpdate,
    ServerState,
    StateChanged,
    Stats,
    StatsReply,
    Submit,
    Timing,
    Update,
    Welcome,
)

CONTEXT_LENGTH = 512
LIMITS = Limits(
    running_max=64,
    queued_max=1024,
    queued_tokens_max=0,
    prompt_tokens_max=399,
    sequence_tokens_max=400,
)
STATS = Stats(
    state=ServerState.SERVING,
    running_requests=3,
    queued_requests=5,
    queued_tokens=700,
    oldest_queued_s=1.5,
    blocks_active=11,
    blocks_free=13,
    seats_active=3,
    requests_total=101,
    requests_rejected_total=7,
    requests_failed_total=2,
    requests_cancelled_total=17,
    prompt_tokens_total=1000,
    cached_prompt_tokens_total=19,
    generated_tokens_total=2000,
    preemptions_total=23,
    steps_total=400,
    generated_tokens_per_second=55.5,
    mean_step_s=0.025,
    last_step_s=0.5,
    device_time=DeviceTime(90_000_000_001, (4, 3, 2, 1), tuple(range(14))),
    step_counts=tuple(range(258)),
)


def facts(revision: str, vocab_size: int) -> ModelFacts:
    """What a small executor on the CPU would say."""
    return ModelFacts(
        revision=revision,
        vocab_size=vocab_size,
        context_length=CONTEXT_LENGTH,
        block_tokens=16,
        block_count=26,
        row_max=64,
        token_max=512,
        device="cpu",
        dtype="float32",
    )


@dataclasses.dataclass(slots=True)
class Live:
    """A submitted request that has not ended."""

    peer: bytes
    submit: Submit
    token_count: int = 0


class FakeScheduler:
    """See the module. Lives on the event loop of its test."""

    def __init__(self, run_folder: Path, model_facts: ModelFacts, limits: Limits = LIMITS) -> None:
        self.facts = model_facts
        self.limits = limits
        self.state = ServerState.SERVING
        self.admits = True
        self.plan: Sequence[int] | None = None
        """Output of every request admitted from now on; None: the test writes it."""
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.hellos: list[GatewayHello] = []
        self.goodbyes = 0
        self.peers_served: set[bytes] = set()
        self.live: dict[tuple[bytes, int], Live] = {}
        self._peers: list[bytes] = []
        self._received = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(GatewayWord)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(rendezvous.gateways_endpoint(run_folder))
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        """Goes away, as a scheduler that dies does."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when `condition` holds; looked at after every word received."""
        async with asyncio.timeout(20):
            while not condition():
                self._received.clear()
                await self._received.wait()

    async def submitted(self, count: int = 1) -> Submit:
        """The submission number `count`, once it is there."""
        await self.until(lambda: len(self.submits) >= count)
        return self.submits[count - 1]

    # -------------------------------------------------------------- what a test says

    def say(self, word: SchedulerUpdate, peer: bytes | None = None) -> None:
        """Sends a word to one gateway, or to all."""
        data = self._encoder.encode(word)
        for receiver in self._peers if peer is None else [peer]:
            self._socket.send_multipart([receiver, data])
        asyncio.get_running_loop().call_soon(self._read)

    def set_state(self, state: ServerState) -> None:
        """Changes and announces the state."""
        self.state = state
        self.say(StateChanged(state))

    def beat(self) -> None:
        """A sign of life."""
        self.say(Beat())

    def write(self, submit: Submit, tokens: Sequence[int], *events: Event) -> None:
        """Tokens and events of one request in one update."""
        live = self._find(submit)
        live.token_count += len(tokens)
        self.say(
            Update(
                handles=array("q", [submit.handle] * len(tokens)).tobytes(),
                tokens=array("i", tokens).tobytes(),
                events=events,
            ),
            live.peer,
        )
        if any(isinstance(event, Finished | Failed) for event in events):
            del self.live[(live.peer, submit.handle)]

    def admit(self, submit: Submit) -> None:
        """Gives the request its place."""
        self.write(submit, (), Admitted(submit.handle))

    def fail(self, submit: Submit, failed: Failed) -> None:
        """Ends the request with a failure."""
        self.write(submit, (), failed)

    def finish(
        self,
        submit: Submit,
        reason: FinishReason,
        tokens: Sequence[int] = (),
        *,
        stop_token: int | None = None,
        stop_string_index: int | None = None,
    ) -> None:
        """The last tokens and a good end."""
        count = self._find(submit).token_count + len(tokens)
        finished = Finished(
            handle=submit.handle,
            reason=reason,
            completion_tokens=count,
            cached_prompt_tokens=4,
            preemption_count=1,
            timing=Timing(0.25, 0.5, 1.0),
            stop_token=stop_token,
            stop_string_index=stop_string_index,
        )
        self.write(submit, tokens, finished)

    # -------------------------------------------------------------- what it hears

    def _find(self, submit: Submit) -> Live:
        return next(live for live in self.live.values() if live.submit is submit)

    def _read(self) -> None:
        while not self._socket.closed:
            try:
                peer, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear(peer, self._decoder.decode(data))
            self._received.set()

    def _hear(self, peer: bytes, word: GatewayWord) -> None:
        match word:
            case GatewayHello():
                self.hellos.append(word)
                self._peers.append(peer)
                self.say(StateChanged(self.state), peer)
                self.say(Welcome("instance-1", self.facts, self.limits), peer)
            case Submit():
                self.live[(peer, word.handle)] = Live(peer, word)
                self.submits.append(word)
                self.peers_served.add(peer)
                if self.admits:
                    self._serve(word)
            case Cancel():
                self.cancels.append(word)
                for handle in word.handles:
                    self._cancel(peer, handle, word.cause)
            case CancelById():
                self._cancel_by_id(peer, word)
            case GetStats(call):
                self.say(StatsReply(call, STATS), peer)
            case GatewayGoodbye():
                self.goodbyes += 1
                self._peers.remove(peer)

    def _serve(self, submit: Submit) -> None:
        self.admit(submit)
        if self.plan is not None:
            tokens = self.plan[: submit.stopping.max_new_tokens]
            self.finish(submit, FinishReason.MAX_NEW_TOKENS, tokens)

    def _cancel(self, peer: bytes, handle: int, cause: CancelCause) -> None:
        live = self.live.get((peer, handle))
        if live is None:
            return
        if cause in (CancelCause.API, CancelCause.DRAIN):
            self.finish(live.submit, FinishReason.CANCELLED)
        else:
            del self.live[(peer, handle)]

    def _cancel_by_id(self, peer: bytes, word: CancelById) -> None:
        found = {live.submit.request_id: live for live in self.live.values()}
        ids = tuple(request_id for request_id in word.request_ids if request_id in found)
        for request_id in ids:
            self.finish(found[request_id].submit, FinishReason.CANCELLED)
        self.say(Cancelled(word.call, ids), peer)
