"""`gapless demo`: the whole server once around. Serves the demo model, asks it one question.

Called by `__main__`, and by ``make demo`` through it.
"""

from __future__ import annotations

import argparse
from typing import Final

from gapless.client import serve, terminal
from gapless.client.errors import GaplessError
from gapless.client.options import make_parser

QUESTION: Final = "What is the capital of France, and what is it known for?"
LISTEN: Final = "127.0.0.1:0"


def run(_arguments: argparse.Namespace) -> int:
    """The exit code: 0 if an answer came and everything stopped as it should."""
    failures: list[GaplessError] = []

    async def ask(address: str) -> None:
        try:
            await _ask(address)
        except GaplessError as error:
            for line in terminal.explain(error, address):
                terminal.note(line)
            failures.append(error)

    arguments = make_parser().parse_args(["serve", "--listen", LISTEN])
    code = serve.run(arguments, ask, quiet=True)
    if failures:
        return terminal.FAILED
    if code == terminal.OK:
        terminal.note("")
        terminal.note("That was the whole path: client, gateway, scheduler, executor. Next:")
        terminal.note("  make serve                    leaves the server running")
        terminal.note("  .venv/bin/gapless chat        talks with it (in another terminal)")
        terminal.note("  make test                     runs the test suite")
    return code


async def _ask(address: str) -> None:
    from gapless.client.client import Client
    from gapless.client.commands import stream_to_terminal
    from gapless.client.values import HealthStatus

    async with Client(address) as client:
        async for status in client.watch_health():
            if status is HealthStatus.SERVING:
                break
        terminal.write(f"\n> {QUESTION}\n\n")
        messages = [{"role": "user", "content": QUESTION}]
        stream = client.generate(messages=messages, temperature=0.0, max_new_tokens=128)
        await stream_to_terminal(stream)
        terminal.write("\n")
