"""How one gateway is set up: its command line, and limits of its own.

Owns names and defaults. Knows nothing of what they limit. Called by ``__main__``; everything else
receives `Config`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

MIB = 1 << 20
SECONDS_MAX = 2_000_000
"""Longest duration of a flag, 23 days: gRPC counts milliseconds in 31 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Everything a gateway is told. The command line sets the first half."""

    run_folder: Path
    model_folder: Path
    model_name: str
    listen: str
    admin_listen: str | None = None
    reuse_port: bool = False
    drain_timeout_s: float = 60.0
    """How long running requests may go on after the lame-duck time."""
    lame_duck_s: float = 5.0
    """How long a draining gateway refuses with its listener open, so that balancers see it."""
    flush_interval_ms: int = 20
    default_max_new_tokens: int = 512
    ready_fd: int | None = None
    allow_chat_template: bool = False
    slow_consumer_s: float = 30.0
    """A client that takes nothing for so long loses its stream."""
    deadline_max_s: float = 3600.0
    """Deadline of a request whose client sets none, and the longest that one may set."""

    prompt_bytes_max: int = 8 * MIB
    """Largest text prompt."""
    threads: int = 4
    """Threads that render templates and tokenise."""
    preparing_max: int = 1024
    """Most requests that wait for those threads or are in them."""
    stop_grace_s: float = 5.0
    """How long the transport has to send the last messages."""
    silence_max_s: float = 10.0
    """A scheduler that says nothing for so long is lost."""


def parse(arguments: Sequence[str] | None = None) -> Config:
    """Reads the command line; prints help or an error and exits as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m gapless.gateway",
        description="Serves the public gRPC API in front of a scheduler.",
    )
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--model", dest="model_folder", type=Path, required=True)
    parser.add_argument("--model-name", required=True, help="name that clients use")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="port 0: any free one")
    parser.add_argument("--admin-listen", metavar="HOST:PORT", help="default: no admin service")
    parser.add_argument("--reuse-port", action="store_true", help="several gateways share one port")
    parser.add_argument("--drain-timeout-s", type=_seconds, help="for running requests")
    parser.add_argument("--lame-duck-s", type=_seconds, help="for load balancers to notice")
    parser.add_argument("--flush-interval-ms", type=_integer(0, 1000))
    parser.add_argument("--default-max-new-tokens", type=_integer(1, 2**31 - 1))
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument(
        "--allow-chat-template", action="store_true", help="clients may send their own template"
    )
    parser.add_argument("--slow-consumer-s", type=_seconds, help="for a reader that stops")
    parser.add_argument("--deadline-max-s", type=_seconds, help="longest request")
    fields = dataclasses.fields(Config)
    parser.set_defaults(
        **{each.name: each.default for each in fields if each.default is not dataclasses.MISSING}
    )
    return Config(**vars(parser.parse_args(arguments)))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {SECONDS_MAX} seconds")
    return value


def _integer(low: int, high: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in {low}..{high}")
        return value

    return integer
