"""A gateway and an executor played by a test, over real sockets and real slots.

They do nothing by themselves: `rig.Rig.until` lets them read and work. The executor has no model:
the token at a position is a hash of the sequence's seed, which it reads in the seat table, and of
the position. So a test knows every stream beforehand, and a token that reached the wrong sequence
shows.
"""

from __future__ import annotations

import copy
import os
import time
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import zmq

from gapless.protos import rendezvous, seats
from gapless.protos.messages import (
    Admitted,
    Attach,
    Beat,
    Cancelled,
    Epoch,
    Event,
    ExecutorHello,
    ExecutorReady,
    ExecutorWord,
    Failed,
    Finished,
    GatewayHello,
    GatewayWord,
    GetStats,
    Handle,
    ModelFacts,
    PrefillStarted,
    SchedulerUpdate,
    SchedulerWord,
    ServerState,
    StateChanged,
    Stats,
    StatsReply,
    StepDone,
    StepNumber,
    StepReady,
    Stop,
    Stopping,
    Submit,
    Update,
    Vocabulary,
    Welcome,
)
from gapless.protos.sampling import Sampling
from gapless.protos.seats import Int32s, SeatLayout
from gapless.protos.slots import (
    NO_CARRY,
    Frame,
    FrameLayout,
    FrameSlots,
    Result,
    ResultLayout,
    ResultSlots,
)

VOCAB_SIZE = 26
REVISION = "0123456789abcdef"

FACTS = ModelFacts(
    revision=REVISION,
    vocab_size=VOCAB_SIZE,
    context_length=256,
    block_tokens=4,
    block_count=129,
    row_max=8,
    token_max=32,
    device="cpu",
    dtype="float32",
)

VOCABULARY = Vocabulary(
    data=b"abcdefghijklmnopqrstuvwxyz",
    ends=np.arange(1, VOCAB_SIZE + 1, dtype="<u4").tobytes(),
    special=bytes(VOCAB_SIZE),
)


def token_at(seed: int, position: int) -> int:
    """What the model says at a position of a sequence with this seed."""
    return (seed * 2654435761 + position * 40503 + (seed ^ position) * 69069) % VOCAB_SIZE


def stream_of(seed: int, prompt_tokens: int, count: int) -> list[int]:
    """The first `count` tokens that a sequence generates."""
    return [token_at(seed, prompt_tokens + k) for k in range(count)]


class Gateway:
    """A gateway that keeps everything it hears."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_folder: Path) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(rendezvous.gateways_endpoint(run_folder))
        self.states: list[ServerState] = []
        self.welcomes: list[Welcome] = []
        self.tokens: dict[Handle, list[int]] = {}
        self.events: dict[Handle, list[Event]] = {}
        self.stats: list[Stats] = []
        self.cancelled: list[Cancelled] = []
        self.beats = 0
        self._decoder = msgspec.msgpack.Decoder(SchedulerUpdate)
        self._calls = 0

    def say(self, word: GatewayWord) -> None:
        self.socket.send(msgspec.msgpack.encode(word))

    def greet(self, revision: str = REVISION) -> None:
        self.say(GatewayHello(revision, VOCABULARY))

    def submit(
        self,
        handle: int,
        *,
        prompt_tokens: int = 5,
        max_new_tokens: int = 10,
        request_id: str | None = None,
        stop_strings: tuple[bytes, ...] = (),
        queue_timeout_s: float | None = None,
        deadline_in_s: float | None = None,
    ) -> Handle:
        """A request whose seed is its handle."""
        now = time.monotonic()
        self.say(
            Submit(
                handle=Handle(handle),
                request_id=request_id or f"request-{handle}",
                tenant="",
                prompt=(np.arange(prompt_tokens, dtype="<i4") % VOCAB_SIZE).tobytes(),
                sampling=Sampling(seed=handle),
                stopping=Stopping(max_new_tokens, stop_strings=stop_strings),
                received_s=now,
                queue_timeout_s=queue_timeout_s,
                deadline_s=None if deadline_in_s is None else now + deadline_in_s,
            )
        )
        return Handle(handle)

    def ask_stats(self) -> int:
        """The number of replies there will be."""
        self._calls += 1
        self.say(GetStats(self._calls))
        return self._calls

    def read(self) -> None:
        while self.socket.poll(0):
            self._take(self._decoder.decode(self.socket.recv()))

    def work(self) -> None:
        """Nothing by itself."""

    def is_admitted(self, handle: Handle) -> bool:
        return any(isinstance(event, Admitted) for event in self.events.get(handle, ()))

    def end(self, handle: Handle) -> Finished | Failed | None:
        """The terminal event, which must be the last of its sequence."""
        for event in self.events.get(handle, ())[-1:]:
            if isinstance(event, Finished | Failed):
                return event
        return None

    def finished(self, handle: Handle) -> Finished:
        event = self.end(handle)
        assert isinstance(event, Finished), event
        return event

    def failed(self, handle: Handle) -> Failed:
        event = self.end(handle)
        assert isinstance(event, Failed), event
        return event

    def _take(self, word: SchedulerUpdate) -> None:
        match word:
            case Update(events=events):
                handles = np.frombuffer(word.handles, "<i8").tolist()
                tokens = np.frombuffer(word.tokens, "<i4").tolist()
                for handle, token in zip(handles, tokens, strict=True):
                    assert self.end(handle) is None, f"{handle} got a token after its end"
                    self.tokens.setdefault(handle, []).append(token)
                for event in events:
                    assert self.end(event.handle) is None, f"{event} after the end"
                    assert isinstance(event, Admitted | PrefillStarted | Finished | Failed)
                    self.events.setdefault(event.handle, []).append(event)
            case StateChanged(state=state):
                self.states.append(state)
            case Welcome():
                self.welcomes.append(word)
            case StatsReply(stats=stats):
                self.stats.append(stats)
            case Cancelled():
                self.cancelled.append(word)
            case Beat():
                self.beats += 1


class Executor:
    """An executor without a model. While `latched` it accepts frames and computes nothing."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_folder: Path) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(rendezvous.executors_endpoint(run_folder))
        self.run_folder = run_folder
        self.attach: Attach | None = None
        self.is_stopped = False
        self.latched = False
        self.accepted: list[Frame] = []
        self.waiting: deque[Frame] = deque()
        self._decoder = msgspec.msgpack.Decoder(SchedulerWord)
        self._frames: FrameSlots | None = None
        self._results: ResultSlots | None = None
        self._table: Int32s = np.zeros((0, 0), np.int32)

    def say(self, word: ExecutorWord) -> None:
        self.socket.send(msgspec.msgpack.encode(word))

    def greet(self, facts: ModelFacts = FACTS) -> None:
        self.say(ExecutorHello(facts, pid=os.getpid()))

    def read(self) -> None:
        while self.socket.poll(0):
            match self._decoder.decode(self.socket.recv()):
                case Attach() as attach:
                    self._map(attach)
                    self.say(ExecutorReady(attach.epoch))
                case StepReady(epoch=epoch, step=step):
                    self._accept(epoch, step)
                case Stop():
                    self.is_stopped = True

    def work(self) -> None:
        while self.waiting and not self.latched:
            self.finish_one()

    def finish_one(self, as_step: StepNumber | None = None) -> None:
        """Computes the oldest accepted step and acknowledges it, as another if a test says so."""
        frame = self.waiting.popleft()
        assert self._results is not None
        now_ns = time.monotonic_ns()
        tokens = [
            token_at(self._seed(seat), position)
            for seat, position in zip(
                frame.rows.seat.tolist(), frame.rows.context_length.tolist(), strict=True
            )
        ]
        self._results.write(
            Result(
                epoch=frame.epoch,
                step=frame.step if as_step is None else as_step,
                tokens=np.array(tokens, np.int32),
                faults=np.zeros(len(tokens), np.int32),
                accepted_ns=now_ns,
                started_ns=now_ns,
                finished_ns=now_ns,
            )
        )
        self.say(StepDone(frame.epoch, frame.step))

    def _map(self, attach: Attach) -> None:
        assert self.attach is None
        self.attach = attach
        frames = FrameLayout(attach.row_max, attach.token_max, attach.assignment_max)
        results = ResultLayout(attach.row_max)
        table = SeatLayout(attach.seat_count, attach.seat_block_max)
        folder, epoch = self.run_folder, attach.epoch
        opened = rendezvous.open_region(rendezvous.frames_path(folder, epoch), frames.size_bytes)
        self._frames = FrameSlots(frames, memoryview(opened))
        opened = rendezvous.open_region(rendezvous.seats_path(folder, epoch), table.size_bytes)
        self._table = table.table(memoryview(opened))
        made = rendezvous.create_region(rendezvous.results_path(folder, epoch), results.size_bytes)
        self._results = ResultSlots(results, memoryview(made))

    def _accept(self, epoch: Epoch, step: StepNumber) -> None:
        assert self._frames is not None
        assert len(self.waiting) < 2, "two steps are in flight already"
        frame = copy.deepcopy(self._frames.read(epoch, step))
        frame.check()
        if self.accepted:
            before = self.accepted[-1]
            assert frame.step == before.step + 1
            for seat, carry in zip(frame.rows.seat, frame.rows.carry_row, strict=True):
                assert carry == NO_CARRY or before.rows.seat[carry] == seat
        self.accepted.append(frame)
        self.waiting.append(frame)

    def _seed(self, seat: int) -> int:
        low, high = self._table[seat, [seats.SEED_LOW, seats.SEED_HIGH]].view(np.uint32).tolist()
        return int(low) | int(high) << 32
