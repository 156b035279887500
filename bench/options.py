"""The command line of ``gapless bench``, as one frozen value.

Owns names, defaults and limits. Called by `__main__`.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gapless.bench.numbers import count, positive
from gapless.protos.executor_flags import ATTENTIONS, DEVICES, DTYPES

EXIT_CODES: Final = (
    "exit codes: 0 measured; 1 a run failed; 2 wrong usage; 4 measured, but some requests got "
    "other tokens at another depth; 130 interrupted"
)
READ_BANDWIDTH_TB_S: Final = 4.39
"""Measured on one H200."""


class HelpWithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Says a default where there is a value to say."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "") else super()._get_help_string(action)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One benchmark."""

    model: str
    device: str
    dtype: str
    attention: str
    batch: int
    prompt: int
    new: int
    mixed: int | None
    """Requests of the mixed work, instead of `batch`."""
    requests_file: Path | None
    depth: tuple[int, ...]
    repeats: int
    warm_up: bool
    running_max: int | None
    token_max: int | None
    executor_args: tuple[str, ...]
    scheduler_args: tuple[str, ...]
    start_timeout_s: float
    read_bandwidth_tb_s: float
    json: Path | None
    raw: Path | None
    trace: Path | None
    trace_steps: int
    system_name: str
    run_id: str | None


def parse(arguments: Sequence[str]) -> Options:
    """Reads a command line.

    Raises:
        SystemExit: it is wrong (status 2) or asks for help (status 0).
    """
    parser = argparse.ArgumentParser(
        prog="gapless bench",
        description="Measures scheduler and executor with the same work at each depth. "
        "With --server ADDRESS it drives a server that runs instead, over gRPC, and takes other "
        "options: see gapless bench --server ADDRESS --help.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
        formatter_class=HelpWithDefaults,
    )
    add = parser.add_argument
    add("--model", required=True, help="a model folder, or preset:NAME with random weights")
    add("--depth", type=_depths, default="1,2", metavar="LIST", help="1 is synchronous")
    add("--repeats", type=count, default=1, metavar="N", help="at each depth")
    add(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run each row count once before",
    )
    _add_work(parser.add_argument_group("work: all requests are there at the start"))
    _add_server(parser.add_argument_group("server"))
    group = parser.add_argument_group("results")
    add = group.add_argument
    add("--json", type=Path, metavar="FILE", help="write one object a measured run")
    add("--raw", type=Path, metavar="FOLDER", help="keep step logs and the processes' logs")
    add("--trace", type=Path, metavar="FILE", help="Chrome/Perfetto trace of the last steps")
    add("--trace-steps", type=count, default=200, metavar="N", help="of each depth")
    add("--system-name", default="gapless", metavar="NAME", help="how the results name it")
    add("--run-id", metavar="ID", help="the same for all that is measured together")
    add(
        "--read-bandwidth-tb-s",
        type=positive,
        default=READ_BANDWIDTH_TB_S,
        metavar="X",
        help="of the GPU's memory, for the floor",
    )
    return Options(**vars(parser.parse_args(arguments)))


def _add_work(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--batch", type=count, default=32, metavar="N", help="requests")
    add("--prompt", type=count, default=256, metavar="N", help="tokens each")
    add("--new", type=count, default=512, metavar="N", help="tokens each")
    others = group.add_mutually_exclusive_group()
    others.add_argument(
        "--mixed",
        type=count,
        nargs="?",
        const=1000,
        metavar="N",
        help="instead: N requests (1000), prompts 128-896, outputs 64-448, at most 256 running",
    )
    others.add_argument(
        "--requests-file",
        type=Path,
        metavar="FILE",
        help='instead: lines {"prompt": COUNT or [IDS], "new": COUNT}',
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", choices=DEVICES, default="auto", help="auto: the GPU if there is one")
    add("--dtype", choices=DTYPES, default="auto", help="of the weights")
    add("--attention", choices=ATTENTIONS, default="auto", help="on a GPU")
    add("--running-max", type=count, metavar="N", help="default: what the work says")
    add("--token-max", type=count, metavar="N", help="default: all prompts, at most 8192")
    add("--executor-args", type=_words, default="", metavar="TEXT", help="more flags, as one text")
    add("--scheduler-args", type=_words, default="", metavar="TEXT", help="likewise")
    add("--start-timeout-s", type=positive, default=600.0, metavar="S")


def _depths(text: str) -> tuple[int, ...]:
    if text not in ("1", "2", "1,2", "2,1"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of 1, 2, 1,2 and 2,1")
    return tuple(map(int, text.split(",")))


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
