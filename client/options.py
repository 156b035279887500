"""The command line of `gapless`: its commands and their options, as argparse sees them.

Owns names, help texts and defaults. Cheap to import: nothing here knows gRPC or asyncio.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from gapless.protos.executor_flags import ATTENTIONS, DEVICES, DTYPES

DEFAULT_SERVER: Final = "localhost:50051"
SERVER_VARIABLE: Final = "GAPLESS_SERVER"
ADMIN_VARIABLE: Final = "GAPLESS_ADMIN"
DEFAULT_LISTEN: Final = "127.0.0.1:50051"
UINT32_MAX: Final = 2**32 - 1
UINT64_MAX: Final = 2**64 - 1

GENERATE_OPTIONS: Final = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_new_tokens",
    "min_new_tokens",
    "stop_strings",
    "stop_token_ids",
    "include_stop_in_text",
    "ignore_eos",
    "return_token_ids",
)
"""Options of the command line that are options of `Client.generate` of the same name."""

_EPILOG: Final = f"""\
exit codes:
  0  done                     3  no server at the address
  1  refused or failed        4  serve: a child process died
  2  wrong usage            130  interrupted

environment:
  {SERVER_VARIABLE}  address of the server (default {DEFAULT_SERVER})
  {ADMIN_VARIABLE}   address of its admin service, for stats
  NO_COLOR        no colour, if set
"""


def token_ids(text: str) -> list[int]:
    """Ids separated by commas or blanks; each fits the 32 bits of a request's field."""
    parts = re.split(r"[\s,]+", text.strip(" \t\n,"))
    if not all(part.isdecimal() and int(part) <= UINT32_MAX for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids such as 1,2,3")
    return [int(part) for part in parts]


class _ShowVersion(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        # Imported here because it costs a tenth of a second that only this option needs.
        from importlib.metadata import version

        print(f"gapless {version('gapless')}")
        sys.exit(0)


def _at_least(low: int, high: int | None = None) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is less than {low}")
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(f"{value} is more than {high}")
        return value

    return integer


def duration(text: str) -> float:
    """Seconds, from 0 on."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a duration")
    return value


def descriptor(text: str) -> int:
    """A file descriptor of this process that can be written to."""
    value = int(text)
    try:
        mode = fcntl.fcntl(value, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{value} is not an open descriptor") from error
    if mode == os.O_RDONLY:
        raise argparse.ArgumentTypeError(f"{value} is only open for reading")
    return value


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; the chosen command is in `command`."""
    parser = argparse.ArgumentParser(
        prog="gapless",
        description="Serves a language model over gRPC, and talks to such a server.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show it and leave")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    server = _server_parent()
    sampling = _sampling_parent()

    serve = commands.add_parser("serve", help="serve a model on this machine")
    _add_serve(serve)
    commands.add_parser("demo", help="serve the demo model, ask it one question, stop")
    # `__main__` hands it over before this parser sees its options.
    commands.add_parser("bench", help="measure a model, or a server that runs; see bench --help")

    generate = commands.add_parser("generate", help="continue a text", parents=[server, sampling])
    generate.add_argument("prompt", nargs="?", help="default, or with -: read from stdin")
    generate.add_argument("--token-ids", type=token_ids, metavar="IDS", help="the prompt as ids")
    generate.add_argument("--chat", action="store_true", help="the prompt is a message of a user")
    generate.add_argument("--system", metavar="TEXT", help="system message; implies --chat")
    generate.add_argument("--json", action="store_true", help="print each event as a JSON line")
    generate.add_argument(
        "--return-token-ids", action="store_true", default=None, help="with --json: token ids too"
    )

    chat = commands.add_parser("chat", help="talk with the model", parents=[server, sampling])
    chat.add_argument("--system", metavar="TEXT", help="system message")

    tokenize = commands.add_parser("tokenize", help="text to token ids", parents=[server])
    tokenize.add_argument("text", nargs="?", help="default, or with -: read from stdin")
    tokenize.add_argument("--chat", action="store_true", help="the text is a message of a user")
    tokenize.add_argument("--count", action="store_true", help="print only the number of tokens")
    tokenize.add_argument("--json", action="store_true", help="print one JSON object")

    detokenize = commands.add_parser("detokenize", help="token ids to text", parents=[server])
    detokenize.add_argument("ids", nargs="*", help="default: read from stdin")
    detokenize.add_argument("--keep-special", action="store_true", help="show special tokens")

    models = commands.add_parser("models", help="what the server offers", parents=[server])
    models.add_argument("--json", action="store_true", help="print each model as a JSON line")

    health = commands.add_parser(
        "health", help="exit code 0 if the server is SERVING", parents=[server]
    )
    health.add_argument("--watch", action="store_true", help="print each change until Ctrl-C")

    stats = commands.add_parser("stats", help="what the server does, and how busy its device is")
    _add_stats(stats)
    return parser


def _add_stats(parser: argparse.ArgumentParser) -> None:
    address = os.environ.get(ADMIN_VARIABLE)
    parser.add_argument(
        "--admin",
        dest="server",
        metavar="ADDRESS",
        default=address,
        required=not address,
        help=f"what `gapless serve --admin-listen` was given; default: ${ADMIN_VARIABLE}",
    )
    parser.add_argument("--timeout-s", type=float, metavar="S", help="give up after this time")
    parser.add_argument("--watch", action="store_true", help="print them each second until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def _server_parent() -> argparse.ArgumentParser:
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument(
        "--server",
        metavar="ADDRESS",
        default=os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER,
        help=f"default: ${SERVER_VARIABLE}, or {DEFAULT_SERVER}",
    )
    parent.add_argument("--model", help="needed only if the server has several")
    parent.add_argument("--timeout-s", type=float, metavar="S", help="give up after this time")
    return parent


def _sampling_parent() -> argparse.ArgumentParser:
    # What a field of a request cannot carry; any other value is the server's to judge.
    uint32 = _at_least(0, UINT32_MAX)
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group("sampling and stops (default: the model's)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=uint32, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--seed", type=_at_least(0, UINT64_MAX), metavar="N")
    group.add_argument("--max-new-tokens", type=uint32, metavar="N")
    group.add_argument("--min-new-tokens", type=uint32, metavar="N")
    group.add_argument(
        "--stop", dest="stop_strings", action="append", metavar="TEXT", help="may be repeated"
    )
    group.add_argument(
        "--stop-token-id", dest="stop_token_ids", action="append", type=uint32, metavar="ID"
    )
    group.add_argument(
        "--include-stop", dest="include_stop_in_text", action="store_true", default=None
    )
    group.add_argument("--ignore-eos", action="store_true", default=None)
    return parent


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    models = "demo (default), a model folder, a GGUF file, a hub name, or preset:NAME"
    add("--model", default="demo", help=f"{models} (random weights, to measure with)")
    add("--model-name", metavar="NAME", help="name for clients; default: from the model")
    add("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help=f"default {DEFAULT_LISTEN}")
    add("--admin-listen", metavar="HOST:PORT", help="default: no admin service")
    add("--gateways", type=_at_least(1), default=1, metavar="N", help="gateway processes")
    add("--run-folder", type=Path, metavar="FOLDER", help="default: a fresh one on tmpfs")
    add("--start-timeout-s", type=duration, default=600.0, metavar="S")
    add("--drain-timeout-s", type=duration, default=60.0, metavar="S", help="for running requests")
    add(
        "--lame-duck-s",
        type=duration,
        default=0.0,
        metavar="S",
        help="for load balancers to notice",
    )
    add("--ready-fd", type=descriptor, metavar="N", help="where to write the ready line as well")
    group = parser.add_argument_group("scheduler (default: its own)")
    group.add_argument("--depth", type=int, choices=(1, 2), help="steps in flight")
    group.add_argument("--running-max", type=_at_least(1), metavar="N")
    group.add_argument("--queued-max", type=_at_least(1), metavar="N")
    group.add_argument("--queued-tokens-max", type=_at_least(0), metavar="N")
    group.add_argument("--step-tokens-max", type=_at_least(1), metavar="N")
    group.add_argument("--chunk-tokens-max", type=_at_least(1), metavar="N")
    group = parser.add_argument_group("executor (default: its own)")
    group.add_argument("--device", choices=DEVICES)
    group.add_argument("--dtype", choices=DTYPES)
    group.add_argument("--kv-blocks", type=_at_least(2), metavar="N")
    group.add_argument("--block-tokens", type=_at_least(1), metavar="N")
    group.add_argument("--row-max", type=_at_least(1), metavar="N")
    group.add_argument("--token-max", type=_at_least(1), metavar="N")
    group.add_argument("--context-length-max", type=_at_least(2), metavar="N")
    group.add_argument(
        "--attention",
        choices=ATTENTIONS,
        help="kernels on a GPU; default: the first of these that is installed and fits the model",
    )
    group.add_argument("--threads", type=_at_least(1), metavar="N")
    group = parser.add_argument_group("gateway (default: its own)")
    group.add_argument("--flush-interval-ms", type=_at_least(0), metavar="N")
    group.add_argument("--default-max-new-tokens", type=_at_least(1), metavar="N")
    group.add_argument(
        "--slow-consumer-s", type=duration, metavar="S", help="for a reader that stops"
    )
    group.add_argument("--deadline-max-s", type=duration, metavar="S", help="longest request")
    group.add_argument(
        "--allow-chat-template",
        action="store_true",
        default=None,
        help="clients may send their own template",
    )
