"""A scheduler process in a run folder of its own, and the players around it.

The players live in the test's thread: `Rig.until` reads what came and lets the executor work,
until a condition holds. Nothing sleeps; what never comes fails the test after `PATIENCE_S`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import zmq

from gapless.protos.messages import Stats
from tests.scheduler_process.players import Executor, Gateway

PATIENCE_S: Final = 60.0
"""After this long a test fails; nothing takes this long on purpose."""


class Scheduler:
    """A scheduler process."""

    def __init__(self, run_folder: Path, *flags: str, interpreter: tuple[str, ...] = ()) -> None:
        self.run_folder = run_folder
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        reader, writer = os.pipe()
        self._ready = os.fdopen(reader)
        command = (sys.executable, *interpreter, "-m", "gapless.scheduler")
        flags = ("--run-folder", str(run_folder), "--ready-fd", str(writer), *flags)
        self.process = subprocess.Popen(
            (*command, *flags), stderr=self._log, stdout=subprocess.DEVNULL, pass_fds=(writer,)
        )
        os.close(writer)

    def wait_ready(self) -> None:
        """Returns when it has bound its sockets."""
        assert self._ready.read() == "ready\n", self.log()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(PATIENCE_S)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._ready.close()
        self._log.close()


class Rig:
    """A run folder, a scheduler and its players."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gapless-")
        self.run_folder = Path(self._folder.name)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.players: list[Gateway | Executor] = []
        self.schedulers: list[Scheduler] = []

    @property
    def scheduler(self) -> Scheduler:
        return self.schedulers[-1]

    def start(self, *flags: str, interpreter: tuple[str, ...] = ()) -> Scheduler:
        self.launch(*flags, interpreter=interpreter).wait_ready()
        return self.scheduler

    def launch(self, *flags: str, interpreter: tuple[str, ...] = ()) -> Scheduler:
        """As `start`, without waiting for it."""
        self.schedulers.append(Scheduler(self.run_folder, *flags, interpreter=interpreter))
        return self.scheduler

    def gateway(self) -> Gateway:
        """Connects a gateway, which greets."""
        gateway = Gateway(self.context, self.run_folder)
        self.players.append(gateway)
        gateway.greet()
        return gateway

    def executor(self) -> Executor:
        """Connects an executor, which greets."""
        executor = Executor(self.context, self.run_folder)
        self.players.append(executor)
        executor.greet()
        return executor

    def serve(self, *flags: str) -> tuple[Gateway, Executor]:
        """Everything started, and the gateway welcome."""
        self.start(*flags)
        gateway, executor = self.gateway(), self.executor()
        self.until(lambda: bool(gateway.welcomes))
        return gateway, executor

    def disconnect(self, player: Gateway | Executor) -> None:
        """What the death of a process does to its socket."""
        self.players.remove(player)
        player.socket.close(0)

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets the players play until `condition` holds, which must be while the scheduler runs."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not self._played(condition):
            assert time.monotonic() < give_up_s, self.scheduler.log()
            assert self.scheduler.process.poll() is None, self.scheduler.log()
            self._await_words()

    def until_ended(self, condition: Callable[[], bool] = lambda: True) -> int:
        """Lets the players play until the scheduler has ended and its last words made
        `condition` hold; its exit status."""
        give_up_s = time.monotonic() + PATIENCE_S
        end = os.pidfd_open(self.scheduler.process.pid)
        try:
            while self.scheduler.process.poll() is None or not self._played(condition):
                assert time.monotonic() < give_up_s, self.scheduler.log()
                self._played(condition)
                self._await_words(end if self.scheduler.process.poll() is None else None)
        finally:
            os.close(end)
        return self.scheduler.process.returncode

    def _played(self, condition: Callable[[], bool]) -> bool:
        for player in self.players:
            player.read()
            player.work()
        return condition()

    def _await_words(self, *others: int | None) -> None:
        poller = zmq.Poller()
        for source in (*(player.socket for player in self.players), *others):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        poller.poll(1000)

    def stats(self, gateway: Gateway) -> Stats:
        """Asks and waits; everything said before has been heard then."""
        count = gateway.ask_stats()
        self.until(lambda: len(gateway.stats) == count)
        return gateway.stats[-1]

    def until_at_rest(self, gateway: Gateway) -> Stats:
        """Waits until nothing runs and nothing is held."""
        while True:
            stats = self.stats(gateway)
            held = stats.running_requests, stats.queued_requests, stats.seats_active
            if held == (0, 0, 0) and stats.blocks_active == 0:
                return stats

    def close(self) -> None:
        for scheduler in self.schedulers:
            scheduler.close()
        self.context.destroy(linger=0)
        self._folder.cleanup()


@contextlib.contextmanager
def new_rig() -> Iterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        rig.close()
