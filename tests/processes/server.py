"""Starts and stops a whole server as real processes: a scheduler, an executor, gateways.

Owns the children, their run folder and their logs. Knows the command lines and the exit codes,
and nothing of what the processes do. Called by the fixtures of the tests.

Nothing here sleeps: a child is ready when it says so on its ``--ready-fd`` pipe (or is gone when
the pipe ends), the server when the health service of its gateways streams SERVING.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = "gapless.v1.InferenceService"
START_LIMIT_S = 110.0
"""Generous: imports and loading on a machine that does other work as well."""
STOP_LIMIT_S = 60.0
LOG_TAIL_BYTES = 3000


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start: the model, and what the command lines say beyond the run folder."""

    model_folder: Path
    model_name: str
    gateway_count: int = 1
    scheduler: tuple[str, ...] = ()
    executor: tuple[str, ...] = ()
    gateway: tuple[str, ...] = ("--lame-duck-s", "0")


class StartError(Exception):
    """A child ended or kept silent instead of becoming ready."""


class Child:
    """One process of the server under test, started at once."""

    def __init__(self, name: str, arguments: list[str], log_folder: Path) -> None:
        self.name = name
        self.exit_seen = False
        """Whether a test has waited for the end itself (and judged the exit code)."""
        self._log_path = log_folder / f"{name}.log"
        self._ready_fd, ready_end = os.pipe()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        try:
            with self._log_path.open("wb") as log:
                self._popen = subprocess.Popen(
                    [sys.executable, "-m", *arguments, "--ready-fd", str(ready_end)],
                    pass_fds=(ready_end,),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
        finally:
            os.close(ready_end)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_ready(self) -> list[str]:
        """The words of the child's ready line behind ``ready``.

        Raises:
            StartError: the child ended first, or the limit is over.
        """
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([self._ready_fd], [], [], START_LIMIT_S)
            if not readable:
                raise StartError(f"{self.name} was not ready after {START_LIMIT_S} s")
            piece = os.read(self._ready_fd, 4096)
            if not piece:
                raise StartError(f"{self.name} closed its ready pipe and said {line!r}")
            line += piece
        words = line.decode().split()
        if words[0] != "ready":
            raise StartError(f"{self.name} said {line!r}")
        return words[1:]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; nothing happens if the child is gone."""
        self._popen.send_signal(number)

    def wait(self) -> int:
        """Exit code; negative = killed by that signal."""
        self.exit_seen = True
        return self._popen.wait(STOP_LIMIT_S)

    def discard(self) -> None:
        """Kills what is left and closes the pipe."""
        if self._popen.returncode is None:
            self._popen.kill()
            self._popen.wait(STOP_LIMIT_S)
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1

    def log_tail(self) -> str:
        text = self._log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return f"--- {self.name} (exit code {self._popen.returncode})\n{text}"


class Server:
    """The processes of one server, all ready; made by `serve`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        model = ["--model", str(plan.model_folder)]
        run_folder = ["--run-folder", str(folder)]
        self.plan = plan
        self.scheduler = Child(
            "scheduler", ["gapless.scheduler", *run_folder, *plan.scheduler], folder
        )
        self.executor = Child(
            "executor", ["gapless.executor", *run_folder, *model, *plan.executor], folder
        )
        listen = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
        name = ["--model-name", plan.model_name]
        self.gateways = tuple(
            Child(
                f"gateway-{index}",
                ["gapless.gateway", *run_folder, *model, *name, *listen, *plan.gateway],
                folder,
            )
            for index in range(plan.gateway_count)
        )
        self.addresses: tuple[str, ...] = ()
        """Where each gateway listens for clients."""
        self.admin_addresses: tuple[str, ...] = ()

    @property
    def children(self) -> tuple[Child, ...]:
        """In the order in which they stop."""
        return (*self.gateways, self.scheduler, self.executor)

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def admin_address(self) -> str:
        return self.admin_addresses[0]

    def wait_serving(self) -> None:
        """Until each child is ready and each gateway's health says SERVING."""
        self.scheduler.wait_ready()
        self.executor.wait_ready()
        ready = [gateway.wait_ready() for gateway in self.gateways]
        self.addresses = tuple(words[0] for words in ready)
        self.admin_addresses = tuple(words[1] for words in ready)
        for address in self.addresses:
            wait_health(address, health_pb2.HealthCheckResponse.SERVING)

    def stop(self) -> None:
        """Ends each child by SIGTERM, gateways first; each must exit with 0."""
        for child in self.children:
            if not child.exit_seen:
                child.signal(signal.SIGTERM)
                code = child.wait()
                assert code == 0, f"{child.name} exited with {code} after SIGTERM"

    def discard(self) -> None:
        for child in self.children:
            child.discard()

    def logs(self) -> str:
        """The ends of all logs, for the report of a failed test."""
        return "\n".join(child.log_tail() for child in self.children)


def wait_health(address: str, wanted: int) -> None:
    """Watches the health of the inference service until it is `wanted`."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        states = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=START_LIMIT_S)
        for state in states:
            if state.status == wanted:
                return
    raise StartError(f"the health stream of {address} ended before the state {wanted}")


@contextlib.contextmanager
def serve(plan: Plan) -> Iterator[Server]:
    """A running server; stopped with exit codes 0, or discarded with its logs printed."""
    with tempfile.TemporaryDirectory(prefix="gapless-", dir=_short_folder()) as name:
        server = Server(plan, Path(name))
        try:
            server.wait_serving()
            yield server
            server.stop()
        except BaseException:
            print(server.logs())
            raise
        finally:
            server.discard()


def _short_folder() -> str | None:
    """Socket paths are short, and the regions belong on tmpfs."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
