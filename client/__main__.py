"""The `gapless` command: parses, calls the command's function, explains failures.

Exit codes are in `terminal`. Each command's module is imported only when it is called, so that
``gapless --help`` is quick.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from gapless.client import extras, terminal
from gapless.client.options import make_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; usage errors leave as SystemExit(2)."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["bench"]:
        # A program of its own, with packages that a client need not have.
        is_load = any(word.partition("=")[0] == "--server" for word in words)
        lack = extras.lacking("bench", extras.LOAD if is_load else extras.BENCH)
        if lack is not None:
            terminal.note(f"gapless bench: {lack}")
            return terminal.FAILED
        os.execv(sys.executable, (sys.executable, "-m", "gapless.bench", *words[1:]))
    try:
        return _run(words)
    except KeyboardInterrupt:
        return terminal.INTERRUPTED
    except BrokenPipeError:
        terminal.discard(sys.stdout)
        return terminal.OUTPUT_CLOSED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        terminal.discard(sys.stdout)
        terminal.note(f"{' '.join(['gapless', *words[:1]])}: {error.strerror}")
        return terminal.FAILED


def _run(words: Sequence[str]) -> int:
    parsed = make_parser().parse_args(words)
    code: int
    if parsed.command in ("serve", "demo", "chat"):
        code = importlib.import_module(f"gapless.client.{parsed.command}").run(parsed)
        return code
    import asyncio

    from gapless.client import commands
    from gapless.client.errors import GaplessError
    from gapless.client.wakeup import woken_by_signals

    try:
        with asyncio.Runner() as runner, woken_by_signals(runner.get_loop()):
            code = runner.run(getattr(commands, parsed.command)(parsed))
            return code
    except GaplessError as error:
        for line in terminal.explain(error, parsed.server, admin=parsed.command == "stats"):
            terminal.note(line)
        return terminal.exit_code(error)
    except ValueError as error:
        # What no request can carry, such as a prompt that is not UTF-8.
        terminal.note(f"gapless {parsed.command}: {error}")
        return terminal.USAGE


if __name__ == "__main__":
    sys.exit(main())
