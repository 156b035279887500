"""`gapless chat`: a conversation at the terminal, or line by line from a pipe.

Owns the conversation. The prompt is read outside the event loop and each answer runs in it, so
Ctrl-C means one thing at a time: at the prompt it drops the line, during an answer it stops the
answer (on the server too). Called by `__main__`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Final

from gapless.client import terminal
from gapless.client.client import Client
from gapless.client.commands import connect, generate_options, stream_to_terminal
from gapless.client.errors import GaplessError
from gapless.client.wakeup import woken_by_signals

PROMPT: Final = "> "
GREETING: Final = (
    "type a message; /reset starts anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer"
)


class Chat:
    """A conversation and the answer that is being given."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self._client = client
        self._options = generate_options(arguments)
        self._address = str(arguments.server)
        self._opening: list[dict[str, str]] = []
        if arguments.system is not None:
            self._opening.append({"role": "system", "content": arguments.system})
        self.messages = list(self._opening)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._opening)

    def say(self, runner: asyncio.Runner, text: str) -> int:
        """One turn. Returns an exit code; the conversation goes on after any but 3.

        A turn that failed is forgotten; one that was stopped keeps what was shown of it.
        """
        self.messages.append({"role": "user", "content": text})
        stream = self._client.generate(messages=self.messages, **self._options)
        shown = ""
        try:
            shown = runner.run(stream_to_terminal(stream))
        except KeyboardInterrupt:
            shown = stream.received_text
            terminal.note("(stopped)")
        except GaplessError as error:
            self.messages.pop()
            for line in terminal.explain(error, self._address):
                terminal.note(line)
            return terminal.exit_code(error)
        if shown:
            self.messages.append({"role": "assistant", "content": shown})
        else:
            self.messages.pop()
        return terminal.OK


def run(arguments: argparse.Namespace) -> int:
    """Reads turns until /quit or the end of the input; the exit code is that of the last turn."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (line editing and history for input())

        terminal.note(GREETING)
    code = terminal.OK
    with asyncio.Runner() as runner, woken_by_signals(runner.get_loop()):
        client = runner.run(_connected(arguments))
        chat = Chat(client, arguments)
        try:
            while code != terminal.NO_SERVER:
                try:
                    line = input(PROMPT if interactive else "").strip()
                except KeyboardInterrupt:
                    if not interactive:
                        raise
                    terminal.write("\n")
                    continue
                except EOFError:
                    break
                if line == "/quit":
                    break
                if line == "/reset":
                    chat.reset()
                    terminal.note("(new conversation)")
                elif line:
                    code = chat.say(runner, line)
        except ValueError as error:
            # What no request can carry, such as a line that is not UTF-8.
            terminal.note(f"gapless chat: {error}")
            return terminal.USAGE
        finally:
            runner.run(client.aclose())
    if interactive:
        terminal.write("\n")
    return code


async def _connected(arguments: argparse.Namespace) -> Client:
    # Made inside the loop, because its channels belong to one.
    return connect(arguments)
