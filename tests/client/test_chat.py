"""`gapless chat`, from a pipe and at a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gapless.protos import inference_pb2
from gapless.protos.reasons import Reason
from tests.client.standin import Events, Standin, delta, hello, refuse, standin_server, started
from tests.client.test_command import run, with_server


def conversation(request: inference_pb2.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.prompt.chat.messages]


def test_lines_of_a_pipe_are_turns() -> None:
    stdin = "first\n\nsecond\n/reset\nthird\n/quit\nnever\n"
    ran, requests = run("chat", "--system", "be brief", "--temperature", "0", stdin=stdin)
    assert (ran.code, ran.out) == (0, "Hello!\n" * 3)
    opening = ("system", "be brief")
    answer = ("assistant", "Hello!")
    assert [conversation(request) for request in requests] == [
        [opening, ("user", "first")],
        [opening, ("user", "first"), answer, ("user", "second")],
        [opening, ("user", "third")],
    ]
    assert all(request.sampling.HasField("temperature") for request in requests)


def test_a_refused_turn_is_forgotten_and_the_talk_goes_on() -> None:
    count = 0

    async def script(request: Any, context: Any) -> Events:
        nonlocal count
        count += 1
        if count == 1:
            await refuse(context, Reason.QUEUE_FULL)
        async for event in hello(request, context):
            yield event

    ran, requests = run("chat", script=script, stdin="first\nsecond\n")
    assert (ran.code, ran.out) == (0, "Hello!\n")
    assert "QUEUE_FULL" in ran.err
    assert conversation(requests[1]) == [("user", "second")]


class Terminal:
    """The other side of a pseudo-terminal on which a command runs."""

    def __init__(self, controller: int, process: asyncio.subprocess.Process) -> None:
        self._controller = controller
        self._process = process
        self.shown = ""
        self._seen = 0

    def type(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    async def until(self, text: str) -> None:
        """Reads on until `text` was shown behind what was waited for before."""
        while (found := self.shown.find(text, self._seen)) < 0:
            data = await asyncio.to_thread(os.read, self._controller, 4096)
            self.shown += data.decode()
        self._seen = found + len(text)

    async def end(self) -> int:
        return await self._process.wait()


@asynccontextmanager
async def terminal(*arguments: str, **environment: str) -> AsyncIterator[Terminal]:
    controller, side = os.openpty()
    # The command's session takes the terminal as its own, so that Ctrl-C reaches it.
    script = (
        "import fcntl, sys, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "from gapless.client.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, *arguments),
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", **environment},
    )
    os.close(side)
    screen = Terminal(controller, process)
    try:
        yield screen
    except BaseException:
        # Where a test waited for something that was never shown.
        print(f"shown until then: {screen.shown!r}")
        raise
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(controller)


async def endless_once(request: inference_pb2.GenerateRequest, context: Any) -> Events:
    if len(request.prompt.chat.messages) > 1:
        async for event in hello(request, context):
            yield event
        return
    yield started()
    yield delta("on and on", 0)
    await asyncio.Event().wait()


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves() -> None:
    async def body(server: Standin) -> None:
        async with terminal("chat", "--server", server.address) as screen:
            await screen.until("> ")
            # Readline notices a Ctrl-C while it waits for keys; one that came before it waits
            # counts at the end of the line. With Enter the line is dropped either way.
            screen.type("half a li\x03\n")
            await screen.until("> ")
            screen.type("first\n")
            await screen.until("on and on")
            screen.type("\x03")
            await server.calls_cancelled.acquire()
            await screen.until("> ")
            assert "(stopped)" in screen.shown
            screen.type("second\n")
            await screen.until("Hello!")
            await screen.until("> ")
            screen.type("\x04")
            assert await screen.end() == 0
        assert conversation(server.requests[0]) == [("user", "first")]
        assert conversation(server.requests[1]) == [
            ("user", "first"),
            ("assistant", "on and on"),
            ("user", "second"),
        ]

    with_server(body, endless_once)


def test_colour_only_where_it_is_wanted() -> None:
    async def closing_line(**environment: str) -> str:
        async with (
            standin_server() as server,
            terminal("generate", "hi", "--server", server.address, **environment) as screen,
        ):
            await screen.until("4 tokens")
            return screen.shown

    assert "\x1b[2m4 tokens" in asyncio.run(closing_line(NO_COLOR=""))
    assert "\x1b" not in asyncio.run(closing_line(NO_COLOR="1"))
    assert "\x1b" not in asyncio.run(closing_line(NO_COLOR="", TERM="dumb"))
