"""The two processes that are measured: started in a run folder, watched, stopped, always killed.

Owns the processes. Knows their command lines, but not what they say. Called by `measure`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

LIFELINE: Final = Path(__file__).parents[1] / "client" / "lifeline.py"
"""Started as a program: what it becomes dies with us, however we end."""
LOG_LINES_SHOWN: Final = 30
STOP_TIMEOUT_S: Final = 60.0


class ServerError(Exception):
    """A process did not start, or ended; the message holds the end of its log."""


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One process of the server."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    ready: int
    """Read end of its ready pipe."""
    end: int
    """pidfd: readable once it has ended."""

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when it has said that it is.

        Raises:
            ServerError: it ended first, or took too long.
        """
        readable, _, _ = select.select([self.ready], [], [], timeout_s)
        if not readable:
            raise self.error(f"was not ready after {timeout_s:g} s")
        if os.read(self.ready, 100) != b"ready\n":
            self.popen.wait()
            raise self.error(f"ended with status {self.popen.returncode} before it was ready")

    def cpu_s(self) -> float:
        """Processor time so far, of all threads."""
        # The name, in parentheses, may hold blanks.
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_resident_bytes(self) -> int:
        """Most memory it had, device memory aside."""
        for line in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
        return 0

    def freeze(self) -> None:
        """Stops all its threads, and returns when they have stopped."""
        self.popen.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self.popen.send_signal(signal.SIGCONT)

    def wait_ended(self) -> None:
        """Waits for a good end.

        Raises:
            ServerError: it was a bad one, or did not come.
        """
        try:
            status = self.popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise self.error("does not end") from None
        if status != 0:
            raise self.error(f"ended with status {status}")

    def error(self, what: str) -> ServerError:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return ServerError("\n    ".join([f"the {self.name} {what}; its log ends with:", *lines]))

    def close(self) -> None:
        """Kills what still runs."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        os.close(self.ready)
        os.close(self.end)


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """Scheduler and executor, both ready."""

    run_folder: Path
    scheduler: Process
    executor: Process
    start_s: float

    @property
    def processes(self) -> tuple[Process, Process]:
        return self.scheduler, self.executor

    def stop(self) -> None:
        """Lets both end as they should: the scheduler drains and dismisses the executor."""
        self.scheduler.popen.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait_ended()


@contextlib.contextmanager
def running(
    scheduler_flags: Sequence[str],
    executor_flags: Sequence[str],
    logs: Path,
    timeout_s: float,
) -> Iterator[Server]:
    """A server in a fresh run folder; what is left of it at the end is killed and removed.

    Args:
        scheduler_flags, executor_flags: beyond those of every process.
        logs: folder that receives one log a process.
        timeout_s: how long each may take to start.

    Raises:
        ServerError: a process did not start.
    """
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="gapless-bench-", dir=parent))
        )
        begin_s = time.monotonic()
        processes: list[Process] = []
        for name, flags in (("scheduler", scheduler_flags), ("executor", executor_flags)):
            process = _start(name, folder, flags, logs)
            stack.callback(process.close)
            process.wait_ready(timeout_s)
            processes.append(process)
        scheduler, executor = processes
        yield Server(folder, scheduler, executor, start_s=time.monotonic() - begin_s)


def _start(name: str, run_folder: Path, flags: Sequence[str], logs: Path) -> Process:
    reader, writer = os.pipe()
    log = logs / f"{name}.log"
    command = (sys.executable, "-m", f"gapless.{name}", "--run-folder", str(run_folder))
    tied = (sys.executable, "-I", "-S", str(LIFELINE), str(os.getpid()))
    with log.open("wb") as output:
        popen = subprocess.Popen(
            (*tied, *command, "--ready-fd", str(writer), *flags),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(writer,),
            process_group=0,  # Ctrl-C is for us; we end them
        )
    os.close(writer)
    return Process(name, popen, log, reader, os.pidfd_open(popen.pid))
