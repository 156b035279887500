"""Starts, watches and stops child processes: the hands of `supervision`, which decides.

Owns the processes, their pipes and the signal handlers of this process; asyncio and the standard
library only. Each child runs in a process group of its own, so that a terminal's Ctrl-C reaches the
supervisor alone, and dies with the supervisor (see `lifeline`). Called by `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from gapless.client import lifeline
from gapless.client.supervision import (
    ChildExited,
    ChildReady,
    DeadlinePassed,
    Effect,
    Ended,
    Input,
    Kill,
    Plan,
    Say,
    Serving,
    SessionEnded,
    SetDeadline,
    Start,
    State,
    StopRequested,
    Supervision,
    Terminate,
)

READY_FD: Final = "{ready_fd}"
"""Stands in a command for the number of the file descriptor to say `ready` on."""
SAME_MOMENT_S: Final = 0.1
"""Signals closer together are one request: `timeout` signals its child, then the whole group."""
LAST_WORDS_S: Final = 1.0
"""How long the output of a dead child is still read: others may hold its pipe open."""
LINE_BYTES_MAX: Final = 64 * 1024
"""Longest line of a child that is kept whole; more of it is another line."""

Report: TypeAlias = Callable[[str, str], None]
"""report(name, line): shows one line of a child's output, or our own if the name is empty."""
Session: TypeAlias = Callable[[Mapping[str, str]], Awaitable[None]]
"""What to do while serving, given each child's ready line; its end stops everything."""


class Lines(asyncio.Protocol):
    """Cuts what comes out of a pipe into lines of at most about `LINE_BYTES_MAX`."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None
        self.at_end = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= LINE_BYTES_MAX:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._on_line(line.decode(errors="replace"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._on_line(self._rest.decode(errors="replace"))
        self.at_end.set()


@dataclass(frozen=True, slots=True)
class _Process:
    process: asyncio.subprocess.Process
    output: Lines
    pipes: tuple[Lines, ...]

    async def wait(self) -> int:
        """The exit status, after the last line of output was passed on."""
        status = await self.process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.output.at_end.wait(), LAST_WORDS_S)
        for pipe in self.pipes:
            pipe.close()
        return status

    def terminate(self) -> None:
        """SIGTERM to the child alone; nothing if it has ended meanwhile."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def signal_group(self, number: signal.Signals) -> None:
        """To the child and whatever it started; nothing if all are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


async def _lines_of(descriptor: int, on_line: Callable[[str], None]) -> Lines:
    lines = Lines(on_line)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: lines, os.fdopen(descriptor, "rb", buffering=0))
    return lines


async def _spawn(
    command: Sequence[str],
    on_line: Callable[[str], None],
    *,
    on_ready: Callable[[str], None] | None = None,
    on_stdout: Callable[[str], None] | None = None,
) -> _Process:
    """Starts `command`, tied to this process. Its output goes to `on_line`."""
    output_end, child_output = os.pipe()
    output = await _lines_of(output_end, on_line)
    pipes = [output]
    inherited: list[int] = []
    owned = [child_output]
    child_stdout = child_output
    if on_stdout is not None:
        stdout_end, child_stdout = os.pipe()
        owned.append(child_stdout)
        pipes.append(await _lines_of(stdout_end, on_stdout))
    if on_ready is not None:
        ready_end, child_ready = os.pipe()
        owned.append(child_ready)
        inherited.append(child_ready)
        pipes.append(await _lines_of(ready_end, on_ready))
        command = [part.replace(READY_FD, str(child_ready)) for part in command]
    tied = [sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid()), *command]
    try:
        process = await asyncio.create_subprocess_exec(
            *tied,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=child_stdout,
            stderr=child_output,
            pass_fds=inherited,
            process_group=0,
        )
    finally:
        for descriptor in owned:
            os.close(descriptor)
    return _Process(process, output, tuple(pipes))


@contextlib.contextmanager
def _signals(on_signal: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM and SIGINT go to `on_signal`, by name; what comes at the same moment is one."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    last_s = -SAME_MOMENT_S

    def deliver(name: str) -> None:
        nonlocal last_s
        if loop.time() - last_s >= SAME_MOMENT_S:
            last_s = loop.time()
            on_signal(name)

    for number in numbers:
        loop.add_signal_handler(number, deliver, number.name)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def run_once(name: str, command: Sequence[str], report: Report) -> tuple[int, list[str]]:
    """Runs a command to its end.

    Returns its exit status, and its stdout as lines; stderr goes to `report`. A signal kills it.
    """
    stdout: list[str] = []
    killed = asyncio.Event()
    with _signals(lambda _: killed.set()):
        process = await _spawn(command, lambda line: report(name, line), on_stdout=stdout.append)

        async def kill() -> None:
            await killed.wait()
            process.signal_group(signal.SIGKILL)

        killer = asyncio.create_task(kill())
        try:
            return await process.wait(), stdout
        finally:
            killer.cancel()


class Supervisor:
    """Runs a plan's children from the first start to the last exit.

    Args:
        plan: names and order.
        commands: name → command; ``{ready_fd}`` in it becomes the number of the descriptor on
            which the child says that it is ready, by one line.
        report: shows lines.
        session: see `Session`; None = serve until a signal comes.
    """

    def __init__(
        self,
        plan: Plan,
        commands: Mapping[str, Sequence[str]],
        report: Report,
        session: Session | None = None,
    ) -> None:
        self._core = Supervision(plan)
        self._commands = commands
        self._report = report
        self._session = session
        self._session_task: asyncio.Task[None] | None = None
        self._inputs: asyncio.Queue[Input] = asyncio.Queue()
        self._processes: dict[str, _Process] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._exit_code: int | None = None

    async def run(self) -> int:
        """The exit code; returns when no child is left. Raises what the session raised."""
        clock = asyncio.get_running_loop().time
        with _signals(lambda name: self._inputs.put_nowait(StopRequested(name))):
            await self._perform(self._core.begin(clock()))
            while self._exit_code is None:
                given = await self._inputs.get()
                await self._perform(self._core.step(given, clock()))
                if self._core.state is not State.SERVING and self._session_task is not None:
                    self._session_task.cancel()
        await asyncio.gather(*self._watchers)
        if self._session_task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._session_task
        return self._exit_code

    async def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Start(name):
                    await self._start(name)
                case Terminate(name):
                    self._processes[name].terminate()
                case Kill(name):
                    self._processes[name].signal_group(signal.SIGKILL)
                case Say(text):
                    self._report("", text)
                case SetDeadline(number, after_s):
                    asyncio.get_running_loop().call_later(
                        after_s, self._inputs.put_nowait, DeadlinePassed(number)
                    )
                case Serving(lines):
                    self._begin_session(lines)
                case Ended(exit_code):
                    self._exit_code = exit_code

    async def _start(self, name: str) -> None:
        process = await _spawn(
            self._commands[name],
            lambda line: self._report(name, line),
            on_ready=lambda line: self._inputs.put_nowait(ChildReady(name, line)),
        )
        self._processes[name] = process

        async def watch() -> None:
            self._inputs.put_nowait(ChildExited(name, await process.wait()))

        self._watchers.add(asyncio.create_task(watch()))

    def _begin_session(self, lines: Mapping[str, str]) -> None:
        if self._session is None:
            return
        self._session_task = task = asyncio.ensure_future(self._session(lines))
        task.add_done_callback(lambda _: self._inputs.put_nowait(SessionEnded()))


def python_module(name: str, *arguments: str | Path) -> list[str]:
    """The command that runs a module in this interpreter."""
    return [sys.executable, "-m", name, *map(str, arguments)]
