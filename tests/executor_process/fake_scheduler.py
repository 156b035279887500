"""The scheduler's side of the conversation for one executor process, driven by a test.

Owns the socket, the regions and the child. Nothing here sleeps: every wait is for a word, a line
or an end, with a limit far above what a busy machine needs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from gapless.protos import rendezvous
from gapless.protos.messages import (
    Attach,
    Epoch,
    ExecutorHello,
    ExecutorReady,
    ExecutorWord,
    SchedulerWord,
    StepDone,
    StepReady,
)
from gapless.protos.seats import Int32s, SeatLayout
from gapless.protos.slots import Frame, FrameLayout, FrameSlots, Result, ResultLayout, ResultSlots

LIMIT_S = 90.0
EPOCH = Epoch(7)
ENTRY = """
import json, sys
from gapless.executor.__main__ import main
status = main(sys.argv[1:])
print(json.dumps(sorted(sys.modules)))
sys.exit(status)
"""
"""Runs the entry module, then tells what it has imported."""


class FakeScheduler:
    """Binds in `run_folder`; knows one executor."""

    def __init__(self, run_folder: Path, attach: Attach) -> None:
        self.attach_word = attach
        self.seats = SeatLayout(attach.seat_count, attach.seat_block_max)
        frames = FrameLayout(attach.row_max, attach.token_max, attach.assignment_max)
        self._run_folder = run_folder
        self._seats_memory = rendezvous.create_region(
            rendezvous.seats_path(run_folder, attach.epoch), self.seats.size_bytes
        )
        frames_memory = rendezvous.create_region(
            rendezvous.frames_path(run_folder, attach.epoch), frames.size_bytes
        )
        self.frames = FrameSlots(frames, memoryview(frames_memory))
        self._results: ResultSlots | None = None
        self._identity = b""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.router_mandatory = True
        self._socket.bind(rendezvous.executors_endpoint(run_folder))
        self._decoder = msgspec.msgpack.Decoder(ExecutorWord)

    @property
    def seat_table(self) -> Int32s:
        return self.seats.table(memoryview(self._seats_memory))

    def receive(self) -> ExecutorWord:
        assert self._socket.poll(int(LIMIT_S * 1000)), "the executor says nothing"
        self._identity, data = self._socket.recv_multipart()
        word: ExecutorWord = self._decoder.decode(data)
        return word

    def send(self, word: SchedulerWord) -> None:
        self._socket.send_multipart([self._identity, msgspec.msgpack.encode(word)])

    def attach(self) -> ExecutorHello:
        """Greets and attaches; the seat table has been written."""
        hello = self.receive()
        assert isinstance(hello, ExecutorHello)
        self.send(self.attach_word)
        assert self.receive() == ExecutorReady(self.attach_word.epoch)
        layout = ResultLayout(self.attach_word.row_max)
        path = rendezvous.results_path(self._run_folder, self.attach_word.epoch)
        results_memory = rendezvous.open_region(path, layout.size_bytes)
        self._results = ResultSlots(layout, memoryview(results_memory))
        return hello

    def publish(self, frame: Frame) -> None:
        self.frames.write(frame)
        self.send(StepReady(frame.epoch, frame.step))

    def result(self) -> Result:
        """Waits for the next result; a view on its slot."""
        word = self.receive()
        assert isinstance(word, StepDone), word
        assert self._results is not None
        return self._results.read(word.epoch, word.step)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@contextlib.contextmanager
def fake_scheduler(run_folder: Path, attach: Attach) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(run_folder, attach)
    try:
        yield scheduler
    finally:
        scheduler.close()


class ExecutorChild:
    """A running ``python -m gapless.executor``."""

    def __init__(self, *arguments: str) -> None:
        self._ready_fd, ready_end = os.pipe()
        self.popen = subprocess.Popen(
            [sys.executable, "-c", ENTRY, *arguments, "--ready-fd", str(ready_end)],
            pass_fds=(ready_end,),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        os.close(ready_end)

    def ready_line(self) -> str:
        """What the child wrote to its ready pipe, up to its end."""
        with os.fdopen(self._ready_fd) as file:
            return file.read()

    def wait_log(self, part: str) -> None:
        """Reads the log up to the line that has `part` in it."""
        assert self.popen.stderr is not None
        lines = []
        for line in self.popen.stderr:
            lines.append(line)
            if part in line:
                return
        raise AssertionError(f"no {part!r} in the log: {''.join(lines)}")

    def end(self) -> tuple[int, str, str]:
        """Exit status, stdout and what is left of the log."""
        out, log = self.popen.communicate(timeout=LIMIT_S)
        return self.popen.returncode, out, log


@contextlib.contextmanager
def executor_child(run_folder: Path, model: Path, *flags: str) -> Iterator[ExecutorChild]:
    child = ExecutorChild("--run-folder", str(run_folder), "--model", str(model), *flags)
    with child.popen:
        try:
            yield child
        finally:
            child.popen.kill()
