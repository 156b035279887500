"""The executor's conversation: greeting, regions, frames out, results back.

Owns the ROUTER socket that executors connect to, the attached executor, and the regions of its
epoch. Knows nothing of requests. Called by `loop`. ::

    hello ──▶ attach ──▶ (executor maps, uploads) ──▶ ready ──▶ publish ⇄ result ... ──▶ stop
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import zmq

from gapless.protos import rendezvous
from gapless.protos.messages import (
    Attach,
    Epoch,
    ExecutorWord,
    ModelFacts,
    SchedulerWord,
    StepDone,
    StepReady,
    Stop,
)
from gapless.protos.seats import Int32s
from gapless.protos.slots import Frame, FrameSlots, Result, ResultSlots
from gapless.scheduler.config import CoreConfig
from gapless.scheduler.frames import apply_assignments
from gapless.scheduler.routers import PeerId, Router

log = logging.getLogger(__name__)

QUEUED_WORDS_MAX: Final = 16
"""Words that may wait for an executor; it owes a result for all but two of them."""


class Executors:
    """The attached executor, if there is one."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run_folder: Path) -> None:
        """Binds the socket, and removes regions that a killed scheduler has left behind."""
        self._router = Router(context, rendezvous.executors_endpoint(run_folder), QUEUED_WORDS_MAX)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ExecutorWord)
        self._run_folder = run_folder
        self._epoch = Epoch(_remove_regions(run_folder))
        self._peer: PeerId | None = None
        self._config: CoreConfig | None = None
        self._frames: FrameSlots | None = None
        self._results: ResultSlots | None = None
        self._table: Int32s | None = None

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What to poll."""
        return self._router.sources

    @property
    def attached(self) -> PeerId | None:
        """The executor that was sent `Attach`."""
        return self._peer

    @property
    def epoch(self) -> Epoch:
        """The attached executor's, or the last one's."""
        return self._epoch

    def receive(self, count_max: int) -> Iterator[tuple[PeerId, ExecutorWord]]:
        """Words that are there already, at most `count_max`; what is no word is dropped."""
        for peer, data in self._router.receive(count_max):
            try:
                yield peer, self._decoder.decode(data)
            except (msgspec.MsgspecError, RecursionError) as error:
                log.error("executor: dropped %d bytes: %s", len(data), error)

    def departed(self) -> bool:
        """Whether the attached executor left since the last call."""
        return self._peer in self._router.departed()

    def attach(self, peer: PeerId, config: CoreConfig) -> Attach:
        """Opens a new epoch: creates its regions and tells the executor."""
        assert self._peer is None, "one executor"
        self._peer, self._config = peer, config
        self._epoch = epoch = Epoch(self._epoch + 1)
        frames, seats = config.frame_layout, config.seat_layout
        frames_path = rendezvous.frames_path(self._run_folder, epoch)
        seats_path = rendezvous.seats_path(self._run_folder, epoch)
        frames_memory = rendezvous.create_region(frames_path, frames.size_bytes)
        seats_memory = rendezvous.create_region(seats_path, seats.size_bytes)
        self._frames = FrameSlots(frames, memoryview(frames_memory))
        self._table = seats.table(memoryview(seats_memory))
        attach = config.attach(epoch)
        self.send(peer, attach)
        return attach

    def open_results(self) -> None:
        """Maps what the executor has created before it said that it is ready."""
        assert self._config is not None, "ready before Attach"
        layout = self._config.result_layout
        path = rendezvous.results_path(self._run_folder, self._epoch)
        memory = rendezvous.open_region(path, layout.size_bytes)
        self._results = ResultSlots(layout, memoryview(memory))

    def publish(self, frame: Frame) -> int:
        """Writes a step's assignments and its frame, then says so.

        Returns when it stood in its slot, CLOCK_MONOTONIC in nanoseconds: a moment before the word
        left, because the executor may have acted on it before we know that it has.
        """
        assert self._frames is not None, "no slots"
        assert self._table is not None, "no seat table"
        assert self._peer is not None, "no executor"
        frame.check()
        apply_assignments(self._table, frame.assignments)
        self._frames.write(frame)
        published_ns = time.monotonic_ns()
        self.send(self._peer, StepReady(frame.epoch, frame.step))
        return published_ns

    def result(self, word: StepDone) -> Result:
        """The result that a word announced: views on its slot."""
        assert self._results is not None, "no result slots"
        return self._results.read(word.epoch, word.step)

    def send(self, peer: PeerId, word: SchedulerWord) -> None:
        """Sends, without waiting; an executor that cannot be reached has `departed`."""
        self._router.send(peer, self._encoder.encode(word))

    def stop(self) -> None:
        """Tells the executor, if there is one, that no step will come."""
        if self._peer is not None:
            self.send(self._peer, Stop())

    def close(self, linger_ms: int) -> None:
        """Unbinds, and removes the regions; whoever still maps them keeps them."""
        self._router.close(linger_ms)
        _remove_regions(self._run_folder)


def facts_mistake(facts: ModelFacts) -> str | None:
    """What no executor may say of itself; None if a core can be made for it."""
    counts = {
        "vocab_size": facts.vocab_size,
        "block_tokens": facts.block_tokens,
        "row_max": facts.row_max,
        "token_max": facts.token_max,
    }
    for name, count in counts.items():
        if not 1 <= count < 2**31:
            return f"{name} is {count}"
    if not 2 <= facts.context_length < 2**31 or not 2 <= facts.block_count < 2**31:
        return f"context_length {facts.context_length}, block_count {facts.block_count}"
    if (facts.block_count - 1) * facts.block_tokens < 2:
        return "its pool has no room for a prompt token and a new one"
    return None


def _remove_regions(run_folder: Path) -> int:
    """Unlinks all regions of a run folder; the last epoch among them, 0 if there was none."""
    last = 0
    for name in ("frames", "seats", "results"):
        for path in run_folder.glob(f"{name}.*"):
            if path.suffix[1:].isdecimal():
                last = max(last, int(path.suffix[1:]))
                path.unlink(missing_ok=True)
    return last
