"""Manners at the terminal: colour only where it is wanted, exit codes, closing lines.

Exit codes of the `gapless` command::

      0  done
      1  the request was refused or failed
      2  wrong usage
      3  no server at the address
      4  gapless serve: a child process died, or was not ready in time
    130  interrupted (Ctrl-C), or stopped by force
    141  whoever read the output went away

Must not know gRPC.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from gapless.client.errors import GaplessError
    from gapless.client.values import Completed

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NO_SERVER: Final = 3
INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 141

_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"


def wants_colour(stream: TextIO) -> bool:
    """A terminal that is not dumb, and NO_COLOR (https://no-color.org) is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def note(text: str) -> None:
    """One line beside the output: on stderr, dim where colour is wanted."""
    if wants_colour(sys.stderr):
        text = f"{_DIM}{text}{_PLAIN}"
    print(text, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def closing_line(completed: Completed, first_token_s: float | None, total_s: float) -> str:
    """Tokens, time to first token and tokens a second, as the client saw them.

    Args:
        completed: of the stream.
        first_token_s: from the call to the first delta, in seconds; None if there was none.
        total_s: from the call to the end, in seconds.
    """
    count = completed.usage.completion_tokens
    parts = [f"{count} token" if count == 1 else f"{count} tokens"]
    if first_token_s is not None:
        parts.append(f"first after {first_token_s:.2f} s")
        if count > 1 and total_s > first_token_s:
            parts.append(f"{(count - 1) / (total_s - first_token_s):.1f} tokens/s")
    return " · ".join(parts)


def explain(error: GaplessError, address: str, *, admin: bool = False) -> list[str]:
    """What to tell a person about a failed call, to the admin service or not; a string a line."""
    from gapless.client.errors import NoServerError

    # The public port of a server answers too, but knows no call of the admin service.
    if admin and (isinstance(error, NoServerError) or error.code == "UNIMPLEMENTED"):
        return [f"no admin service at {address}: start one with `gapless serve --admin-listen`"]
    if isinstance(error, NoServerError):
        return [f"no server at {address}: start one with `gapless serve`"]
    label = error.reason or error.code
    lines = [f"{label}: {error}"]
    # A server that has but one objection says it in the message already.
    lines += [
        f"  {violation.field}: {violation.description}"
        for violation in error.violations
        if violation.description not in str(error)
    ]
    lines += [f"  {key}: {value}" for key, value in sorted(error.metadata.items())]
    if error.retry_after_s is not None:
        lines.append(f"  try again in {error.retry_after_s:g} s")
    return lines


def exit_code(error: GaplessError) -> int:
    """3 if nothing answers, else 1."""
    from gapless.client.errors import NoServerError

    return NO_SERVER if isinstance(error, NoServerError) else FAILED


def discard(stream: TextIO) -> None:
    """Lets `stream` swallow everything from now on: its reader went away."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
