"""The `gapless` command as a process, against a stand-in server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from gapless.protos.reasons import Reason
from tests.client.standin import (
    Events,
    Script,
    Standin,
    delta,
    hello,
    refuse,
    standin_server,
    started,
)

MODULE = [sys.executable, "-m", "gapless.client"]
NOBODY = "127.0.0.1:1"


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


async def start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *MODULE,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )


async def gapless(*arguments: str, stdin: str = "", **environment: str) -> Ran:
    process = await start(*arguments, **environment)
    out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


def with_server(body: Callable[[Standin], Awaitable[None]], script: Script = hello) -> None:
    async def run() -> None:
        async with standin_server(script) as server:
            await body(server)

    asyncio.run(run())


def run(*arguments: str, script: Script = hello, stdin: str = "") -> tuple[Ran, list[Any]]:
    """Runs one command; what it did and what the server got."""
    results: list[Ran] = []
    requests: list[Any] = []

    async def body(server: Standin) -> None:
        results.append(await gapless(*arguments, stdin=stdin, GAPLESS_SERVER=server.address))
        requests.extend(server.requests)

    with_server(body, script)
    return results[0], requests


async def endless(request: Any, context: Any) -> Events:
    yield started()
    yield delta("and so on", 0)
    await asyncio.Event().wait()


def test_generate_writes_the_text_and_a_closing_line() -> None:
    ran, (request,) = run("generate", "hi", "--temperature", "0", "--stop", "a", "--stop", "b")
    assert (ran.code, ran.out) == (0, "Hello!\n")
    assert ran.err.startswith("4 tokens · first after ")
    assert "\x1b" not in ran.err
    assert request.prompt.text == "hi"
    assert request.stopping.stop_strings == ["a", "b"]
    assert request.sampling.HasField("temperature")
    assert not request.stopping.HasField("ignore_eos")


@pytest.mark.parametrize("arguments", [("generate",), ("generate", "-")])
def test_generate_reads_stdin(arguments: Sequence[str]) -> None:
    _, (request,) = run(*arguments, stdin="from a pipe\n")
    assert request.prompt.text == "from a pipe\n"


def test_generate_takes_a_conversation_or_ids() -> None:
    _, (request,) = run("generate", "hi", "--system", "be brief")
    roles = [(message.role, message.content) for message in request.prompt.chat.messages]
    assert roles == [("system", "be brief"), ("user", "hi")]
    _, (request,) = run("generate", "--token-ids", "1, 2 3")
    assert list(request.prompt.token_ids.ids) == [1, 2, 3]


def test_generate_as_json_is_one_event_a_line() -> None:
    ran, _ = run("generate", "hi", "--json")
    events = [json.loads(line) for line in ran.out.splitlines()]
    assert [event["event"] for event in events] == ["started", *["delta"] * 3, "completed"]
    assert "".join(event.get("text", "") for event in events) == "Hello!"
    assert events[-2]["finish"]["reason"] == "STOP_TOKEN"
    assert events[-1]["completion_tokens"] == 4


async def too_long(request: Any, context: Any) -> Events:
    violation = error_details_pb2.BadRequest.FieldViolation(field="prompt", description="too long")
    details = error_details_pb2.BadRequest(field_violations=[violation])
    await refuse(context, Reason.CONTEXT_LENGTH_EXCEEDED, details, promptTokens="9000")
    yield started()


def test_a_refusal_is_explained_with_code_1() -> None:
    ran, _ = run("generate", "hi", script=too_long)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.splitlines() == [
        "CONTEXT_LENGTH_EXCEEDED: because of CONTEXT_LENGTH_EXCEEDED",
        "  prompt: too long",
        "  promptTokens: 9000",
    ]
    ran, _ = run("generate", "hi", "--json", script=too_long)
    event = json.loads(ran.out)
    assert (event["event"], event["reason"]) == ("error", "CONTEXT_LENGTH_EXCEEDED")


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "hi"),
        ("chat",),
        ("tokenize", "hi"),
        ("detokenize", "1"),
        ("models",),
        ("health",),
    ],
)
def test_a_missing_server_is_said_with_code_3(arguments: Sequence[str]) -> None:
    ran = asyncio.run(gapless(*arguments, "--server", NOBODY, stdin="hi\n"))
    assert ran.code == 3
    assert ran.err == f"no server at {NOBODY}: start one with `gapless serve`\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("fly",),
        ("generate", "hi", "--temperature", "warm"),
        ("generate", "hi", "--top-k", "-1"),
        ("generate", "hi", "--seed", str(2**64)),
        ("generate", "hi", "--stop-token-id", str(2**32)),
        ("generate", "hi", "--token-ids", "1"),
        ("generate", "--token-ids", "one"),
        ("detokenize", "one"),
        ("serve", "--gateways", "0"),
        ("serve", "--drain-timeout-s", "-1"),
        ("serve", "--start-timeout-s", "nan"),
        ("serve", "--ready-fd", "77"),
        ("serve", "--ready-fd", "-1"),
        ("serve", "--listen", NOBODY, "--admin-listen", NOBODY),
    ],
)
def test_wrong_usage_is_code_2(arguments: Sequence[str]) -> None:
    ran = asyncio.run(gapless(*arguments, GAPLESS_SERVER=NOBODY))
    assert ran.code == 2
    assert "Traceback" not in ran.err


def test_a_number_that_no_request_can_carry_is_said_with_its_flag() -> None:
    ran = asyncio.run(gapless("generate", "hi", "--max-new-tokens", "-1", GAPLESS_SERVER=NOBODY))
    assert ran.err.endswith("argument --max-new-tokens: -1 is less than 0\n")


@pytest.mark.parametrize("command", ["generate", "tokenize"])
def test_a_text_that_is_not_utf_8_is_wrong_usage(command: str) -> None:
    async def body() -> None:
        process = await start(command, GAPLESS_SERVER=NOBODY, PYTHONUTF8="1")
        _, err = await process.communicate(b"caf\xe9")
        assert process.returncode == 2
        assert err.decode() == f"gapless {command}: the text is not valid UTF-8\n"

    asyncio.run(body())


def test_output_that_finds_no_space_is_said() -> None:
    async def body(server: Standin) -> None:
        process = await asyncio.create_subprocess_exec(
            *MODULE,
            "generate",
            "hi",
            "--server",
            server.address,
            stdout=full,
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await process.communicate()
        assert process.returncode == 1
        assert err.decode() == "gapless generate: No space left on device\n"

    with open("/dev/full", "w") as full:
        with_server(body)


async def breaks(request: Any, context: Any) -> Events:
    yield started()
    yield delta("so far", 0)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def test_an_end_that_grpc_made_is_said_in_words() -> None:
    ran, _ = run("generate", "hi", script=breaks)
    assert (ran.code, ran.out) == (1, "so far\n")
    assert ran.err == "UNAVAILABLE: the connection to the server broke: Socket closed\n"
    ran, _ = run("generate", "hi", "--timeout-s", "0")
    assert ran.err == "DEADLINE_EXCEEDED: the time that the call was given ran out\n"


def test_the_small_commands() -> None:
    assert run("tokenize", "abcd")[0].out == "5 6\n"
    assert run("tokenize", "abcd", "--count")[0].out == "2\n"
    assert json.loads(run("tokenize", "abcd", "--json")[0].out)["rendered_text"] == "abcd"
    assert run("detokenize", "5", "6")[0].out == "5 6"
    assert run("detokenize", stdin="5 6\n")[0].out == "5 6"
    assert run("models")[0].out.startswith("standin  ")
    assert json.loads(run("models", "--json")[0].out)["vocab_size"] == 100


def test_health_is_0_only_if_serving() -> None:
    async def body(server: Standin) -> None:
        ran = await gapless("health", "--server", server.address)
        assert (ran.code, ran.out) == (0, "SERVING\n")
        await server.set_serving(False)
        ran = await gapless("health", "--server", server.address)
        assert (ran.code, ran.out) == (1, "NOT_SERVING\n")

    with_server(body)


def test_health_can_be_watched_until_ctrl_c() -> None:
    async def body(server: Standin) -> None:
        process = await start("health", "--watch", "--server", server.address)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"SERVING\n"
        await server.set_serving(False)
        assert await process.stdout.readline() == b"NOT_SERVING\n"
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        assert (process.returncode, err) == (130, b"")

    with_server(body)


def test_ctrl_c_stops_generate_here_and_on_the_server() -> None:
    async def body(server: Standin) -> None:
        process = await start("generate", "hi", "--server", server.address)
        assert process.stdout is not None
        assert await process.stdout.readexactly(9) == b"and so on"
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
        assert (process.returncode, out, err) == (130, b"\n", b"")
        await server.calls_cancelled.acquire()

    with_server(body, endless)


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    async def script(request: Any, context: Any) -> Events:
        yield started()
        for index in range(1_000_000):
            yield delta("more and more ", index)

    async def body(server: Standin) -> None:
        reader, writer = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *MODULE,
            "generate",
            "hi",
            "--server",
            server.address,
            stdout=writer,
            stderr=asyncio.subprocess.PIPE,
        )
        os.close(writer)
        await asyncio.to_thread(os.read, reader, 1)
        os.close(reader)
        _, err = await process.communicate()
        assert (process.returncode, err) == (141, b"")

    with_server(body, script)


def test_help_loads_neither_grpc_nor_asyncio() -> None:
    script = (
        "import sys\n"
        "from gapless.client.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(sys.modules.keys() & {'grpc', 'asyncio', 'google.protobuf'}))\n"
    )

    async def help_() -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        return out.decode()

    assert asyncio.run(help_()).splitlines()[-1] == "[]"
