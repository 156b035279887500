"""The executor's conversation with the scheduler, and the loop of the I/O thread.

Owns the socket, the regions of the epoch and the order of words. Knows nothing of models; drives a
`Device`. Called by `__main__` in the process's main thread, once::

    ─ ExecutorHello ─▶            the model is loaded, the KV pool stands
    ◀─ Attach ─                   map frames and seats, create results, start the device
    ─ ExecutorReady ─▶            seat table uploaded
    ◀─ StepReady ─  ─ StepDone ─▶      at most two steps between the two
    ◀─ Stop ─                     what was accepted finishes, then the process ends

The loop sleeps in one poll over four sources: words, the connection's monitor, signals, and the
device's results. Nothing is looked at before it speaks, unless the device says that a result is so
near that sleep would make it late.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import zmq

from gapless.executor.device import Device, Regions, StartDevice
from gapless.executor.signals import Signals
from gapless.protos import rendezvous
from gapless.protos.messages import (
    Attach,
    Epoch,
    ExecutorFault,
    ExecutorHello,
    ExecutorReady,
    ExecutorWord,
    ModelFacts,
    SchedulerWord,
    StepDone,
    StepReady,
    Stop,
)
from gapless.protos.seats import SeatLayout
from gapless.protos.slots import FrameLayout, FrameSlots, ResultLayout, ResultSlots

LINGER_MS: Final = 1000
"""How long the last words may take to leave when the process ends."""

log = logging.getLogger(__name__)


class Ending(enum.IntEnum):
    """How the conversation ended; the numbers are the process's exit statuses."""

    DONE = 0
    """The scheduler said Stop, or SIGTERM came before there was anything to drain."""
    BROKEN = 1
    """The device or an assertion failed; the scheduler was told."""
    SCHEDULER_LOST = 3
    FORCED = 130
    """A second signal: steps in flight are abandoned."""


class Link:
    """One connection to the scheduler, for one epoch."""

    def __init__(
        self,
        run_folder: Path,
        signals: Signals,
        facts: ModelFacts,
        start_device: StartDevice,
        announce: Callable[[], None],
    ) -> None:
        """Connects, without waiting: the scheduler may start later.

        Args:
            run_folder: the server's.
            signals: already counting.
            facts: what the scheduler must know of model and device.
            start_device: called once attached; uploads the seat table.
            announce: called once `ExecutorReady` was sent.
        """
        self._run_folder = run_folder
        self._signals = signals
        self._facts = facts
        self._start_device = start_device
        self._announce = announce
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = LINGER_MS
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(rendezvous.executors_endpoint(run_folder))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SchedulerWord)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, signals.wakeup):
            self._poller.register(source, zmq.POLLIN)
        self._epoch = Epoch(0)
        self._device: Device | None = None
        self._stopping = False

    def run(self) -> Ending:
        """Greets, then serves until the conversation ends."""
        self._send(ExecutorHello(facts=self._facts, pid=os.getpid()))
        try:
            ending = None
            while ending is None:
                ending = self._turn()
        except Exception as error:
            # Whatever broke, the scheduler hears it as a word before it sees the process go.
            log.exception("the executor broke")
            self._send(ExecutorFault(self._epoch, _one_line(error)))
            return Ending.BROKEN
        if ending is Ending.DONE and self._device is not None:
            self._device.close()
            rendezvous.results_path(self._run_folder, self._epoch).unlink(missing_ok=True)
        return ending

    def close(self) -> None:
        """Closes the sockets and lets last words leave."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()

    def _turn(self) -> Ending | None:
        """Waits for the next thing to happen and does what it asks."""
        device = self._device
        sleeps = device is None or device.may_sleep()
        ready = dict(self._poller.poll(None if sleeps else 0))
        if self._signals.wakeup in ready and (ending := self._on_signals()) is not None:
            return ending
        if device is not None and (not sleeps or device.wakeup in ready):
            for step in device.finished():
                self._send(StepDone(self._epoch, step))
        lost = self._monitor in ready
        if lost:
            self._read_words()  # what came before the loss counts
        elif self._socket in ready:
            self._on_word(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        if self._stopping and (self._device is None or self._device.in_flight == 0):
            log.info("stopped")
            return Ending.DONE
        if lost and not self._stopping:
            log.error("the scheduler is gone")
            return Ending.SCHEDULER_LOST
        return None

    def _on_signals(self) -> Ending | None:
        count = self._signals.take()
        if count > 1:
            log.warning("second signal: leaving at once")
            return Ending.FORCED
        if self._device is None:
            log.info("stopped before any step came")
            return Ending.DONE
        # The scheduler drains: what is running needs steps, and it says Stop behind the last.
        log.info("signal: serving until the scheduler says stop")
        return None

    def _read_words(self) -> None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_word(self._decoder.decode(data))

    def _on_word(self, word: SchedulerWord) -> None:
        match word:
            case Attach():
                self._attach(word)
            case StepReady(epoch=epoch, step=step):
                assert self._device is not None, f"step {step} before Attach"
                assert epoch == self._epoch, f"step {step} of epoch {epoch}, not {self._epoch}"
                assert not self._stopping, f"step {step} behind Stop"
                self._device.accept(step)
            case Stop():
                self._stopping = True

    def _attach(self, attach: Attach) -> None:
        assert self._device is None, f"attached to epoch {self._epoch} already"
        assert attach.row_max <= self._facts.row_max, (attach, self._facts)
        assert attach.token_max <= self._facts.token_max, (attach, self._facts)
        self._epoch = attach.epoch
        self._device = self._start_device(attach, self._map(attach))
        self._poller.register(self._device.wakeup, zmq.POLLIN)
        self._send(ExecutorReady(attach.epoch))
        self._announce()
        log.info("attached, epoch %d", attach.epoch)

    def _map(self, attach: Attach) -> Regions:
        frames = FrameLayout(attach.row_max, attach.token_max, attach.assignment_max)
        results = ResultLayout(attach.row_max)
        seats = SeatLayout(attach.seat_count, attach.seat_block_max)
        folder, epoch = self._run_folder, attach.epoch
        open_region, create_region = rendezvous.open_region, rendezvous.create_region
        frames_memory = open_region(rendezvous.frames_path(folder, epoch), frames.size_bytes)
        seats_memory = open_region(rendezvous.seats_path(folder, epoch), seats.size_bytes)
        results_memory = create_region(rendezvous.results_path(folder, epoch), results.size_bytes)
        return Regions(
            frames=FrameSlots(frames, memoryview(frames_memory)),
            results=ResultSlots(results, memoryview(results_memory)),
            seat_table=seats.table(memoryview(seats_memory)),
        )

    def _send(self, word: ExecutorWord) -> None:
        self._socket.send(self._encoder.encode(word), zmq.NOBLOCK)


def _one_line(error: Exception) -> str:
    """Such as ``StepError: AssertionError: a step has rows``."""
    return " ".join(f"{type(error).__name__}: {error}".split())
