"""`gapless serve`: one server on this machine, from a model's name to the last process's end.

Owns the command lines of the processes and their order; `supervisor` runs them. Called by the
command line and by the demo. Must not know what the processes do.

::

    start   model ─▶ scheduler ─▶ executor + gateways ─▶ ready
    stop             gateways (drain) ─▶ scheduler ─▶ executor
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

from gapless.client import extras, terminal
from gapless.client.run_folder import RunFolderError, run_folder
from gapless.client.supervision import Plan
from gapless.client.supervisor import READY_FD, Supervisor, python_module, run_once
from gapless.protos.model_folder import missing_files

DEMO: Final = "demo"
DEMO_NAME: Final = "smollm2-135m-instruct"
PRESET_PREFIX: Final = "preset:"
MODEL: Final = "model"
"""Name of the process that prepares the model."""
KEPT_LINES_MAX: Final = 100
STOP_MARGIN_S: Final = 15.0
"""Beyond drain and lame duck: time to close streams and to exit."""
WILDCARDS: Final = ("0.0.0.0", "[::]")

Session: TypeAlias = Callable[[str], Awaitable[None]]
"""What to do while serving, given the address; its end stops the server."""

PASSED_ON: Final[Mapping[str, tuple[str, ...]]] = {
    "scheduler": (
        "depth",
        "running_max",
        "queued_max",
        "queued_tokens_max",
        "step_tokens_max",
        "chunk_tokens_max",
        "drain_timeout_s",
    ),
    "executor": (
        "device",
        "attention",
        "dtype",
        "kv_blocks",
        "block_tokens",
        "row_max",
        "token_max",
        "context_length_max",
        "threads",
    ),
    "gateway": (
        "drain_timeout_s",
        "lame_duck_s",
        "flush_interval_ms",
        "default_max_new_tokens",
        "slow_consumer_s",
        "deadline_max_s",
        "allow_chat_template",
    ),
}
"""Kind of process → options that it takes under the same name; one not given is not passed."""


class ServeError(Exception):
    """The server cannot be started as asked; the message is for the person who asked."""


class AddressError(ServeError):
    """An address is not of the form HOST:PORT, or is given twice."""


class _Report:
    """Lines on stderr, each with the name of who says it.

    Args:
        width: of the names, in characters.
        quiet: keep the last lines of the children for `show_kept`, instead of showing them.
    """

    def __init__(self, width: int, *, quiet: bool) -> None:
        self.width = width
        self._quiet = quiet
        self._kept: deque[tuple[str, str]] = deque(maxlen=KEPT_LINES_MAX)

    def __call__(self, name: str, line: str) -> None:
        if self._quiet and name not in ("", MODEL):
            self._kept.append((name, line))
        else:
            self._show(name, line)

    def show_kept(self) -> None:
        """What was kept, for someone who must find out what went wrong."""
        while self._kept:
            self._show(*self._kept.popleft())

    def _show(self, name: str, line: str) -> None:
        prefix = f"{name or 'gapless':<{self.width}} |"
        if name and terminal.wants_colour(sys.stderr):
            prefix = f"\x1b[2m{prefix}\x1b[0m"
        try:
            print(f"{prefix} {line}", file=sys.stderr, flush=True)
        except BrokenPipeError:
            # Whoever read along went away; that is no reason to stop serving.
            terminal.discard(sys.stderr)


def run(
    arguments: argparse.Namespace, session: Session | None = None, *, quiet: bool = False
) -> int:
    """Serves until a signal comes, a child dies, or `session` ends; returns the exit code.

    With `quiet`, what the processes log is shown only if something went wrong.
    """
    width = max(len("scheduler"), len(f"gateway-{arguments.gateways - 1}"))
    report = _Report(width, quiet=quiet)
    try:
        code = asyncio.run(_serve(arguments, session, report))
        if code != terminal.OK:
            report.show_kept()
        return code
    except (ServeError, RunFolderError) as error:
        terminal.note(f"gapless serve: {error}")
        return terminal.USAGE if isinstance(error, AddressError) else terminal.FAILED


async def _serve(arguments: argparse.Namespace, session: Session | None, report: _Report) -> int:
    lack = extras.lacking("serve", extras.SERVE)
    if lack is not None:
        raise ServeError(lack)
    if arguments.listen == arguments.admin_listen and split_address(arguments.listen)[1]:
        raise AddressError("--listen and --admin-listen are the same address")
    with (
        reserved(arguments.listen, arguments.gateways) as listen,
        _admin(arguments) as admin,
        run_folder(arguments.run_folder) as folder,
    ):
        model_folder = await _prepared(arguments.model, report)
        if model_folder is None:
            return terminal.INTERRUPTED
        commands = make_commands(arguments, folder, model_folder, listen, admin)

        async def serving(lines: Mapping[str, str]) -> None:
            await _announce_and(session, lines["gateway-0"], arguments.ready_fd, report)

        return await Supervisor(make_plan(arguments), commands, report, serving).run()


async def _announce_and(
    session: Session | None, ready_line: str, ready_fd: int | None, report: _Report
) -> None:
    address = reachable(ready_line.split()[1])
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as pipe:
            pipe.write(f"{ready_line}\n")
    if session is not None:
        await session(address)
        return
    question = '--temperature 0 --chat "What is the capital of France?"'
    report("", f"ready: gapless generate --server {address} {question}")
    report("", f"   or: gapless chat --server {address}      (Ctrl-C here stops the server)")
    await asyncio.Event().wait()


async def _prepared(model: str, report: _Report) -> Path | None:
    """The model folder of `model`; None if a signal came meanwhile.

    Raises:
        ServeError: there is no such model.
    """
    complete = _complete_folder(model)
    if complete is not None:
        return complete
    report("", f"model: preparing {model} ...")
    command = python_module("gapless.executor.prepare", model)
    status, stdout = await run_once(MODEL, command, report)
    if status < 0:
        return None
    if status != 0 or not stdout:
        raise ServeError(f"cannot prepare model {model!r}")
    return Path(stdout[-1])


def _complete_folder(model: str) -> Path | None:
    folder = Path(model)
    return None if missing_files(folder) else folder.absolute()


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Who starts and stops after whom."""
    gateways = tuple(f"gateway-{index}" for index in range(arguments.gateways))
    doing = {"scheduler": "starting", "executor": "loading weights"}
    return Plan(
        start=(("scheduler",), ("executor", *gateways)),
        stop=(gateways, ("scheduler",), ("executor",)),
        doing=doing | dict.fromkeys(gateways, "loading the tokenizer"),
        start_timeout_s=arguments.start_timeout_s,
        stop_timeout_s=arguments.drain_timeout_s + arguments.lame_duck_s + STOP_MARGIN_S,
    )


def make_commands(
    arguments: argparse.Namespace,
    folder: Path,
    model_folder: Path,
    listen: str,
    admin_listen: str | None,
) -> dict[str, Sequence[str]]:
    """The command line of each process."""

    def command(kind: str, *more: str | Path) -> list[str]:
        passed = [
            part
            for option in PASSED_ON[kind]
            if (value := getattr(arguments, option)) is not None
            for part in _flag(option, value)
        ]
        start = python_module(f"gapless.{kind}", "--run-folder", folder, "--ready-fd", READY_FD)
        return [*start, *map(str, more), *passed]

    # The weights of a preset are drawn where they are needed.
    is_preset = arguments.model.startswith(PRESET_PREFIX)
    weights = arguments.model if is_preset else model_folder
    commands: dict[str, Sequence[str]] = {
        "scheduler": command("scheduler"),
        "executor": command("executor", "--model", weights),
    }
    shared = ["--model", str(model_folder), "--model-name", model_name(arguments)]
    shared += ["--listen", listen]
    if arguments.gateways > 1:
        shared.append("--reuse-port")
    for index in range(arguments.gateways):
        own = ["--admin-listen", admin_listen] if index == 0 and admin_listen is not None else []
        commands[f"gateway-{index}"] = command("gateway", *shared, *own)
    return commands


def _flag(option: str, value: object) -> tuple[str, ...]:
    """An option as a command line says it; one that is True has no value there."""
    name = f"--{option.replace('_', '-')}"
    return (name,) if value is True else (name, str(value))


def model_name(arguments: argparse.Namespace) -> str:
    """The name that clients use, unless one was chosen: the last part of the model's."""
    if arguments.model_name is not None:
        return str(arguments.model_name)
    if arguments.model == DEMO:
        return DEMO_NAME
    path = Path(arguments.model)
    return path.resolve().name if path.exists() else str(arguments.model)


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` → its parts.

    Raises:
        AddressError: it is not of that form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise AddressError(f"{address!r} is no HOST:PORT")
    return host, int(port)


def reachable(address: str) -> str:
    """What a client on this machine dials: a wildcard address becomes localhost."""
    host, port = split_address(address)
    return f"localhost:{port}" if host in WILDCARDS else address


@contextmanager
def _admin(arguments: argparse.Namespace) -> Iterator[str | None]:
    if arguments.admin_listen is None:
        yield None
        return
    with reserved(arguments.admin_listen, 1, "--admin-listen") as address:
        yield address


@contextmanager
def reserved(address: str, process_count: int, flag: str = "--listen") -> Iterator[str]:
    """The address to listen on, known to be free.

    For several processes the port is bound (not listened on) until the end, so that all of them
    get the same one even if it was given as 0. For one process it is only tried: that process
    then reports what port it got. `flag` is the one to name to whoever must choose another.

    Raises:
        ServeError: the port is taken, or the host is not one of this machine.
    """
    host, port = split_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            # So that a port whose last connections linger counts as free; a listener still shows.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServeError(
                f"port {port} is in use: is a server running already? choose another {flag}"
            ) from error
        raise ServeError(f"cannot listen on {address}: {error.strerror}") from error
    if process_count == 1:
        yield address
        return
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(where)
        yield f"{host}:{holder.getsockname()[1]}"
