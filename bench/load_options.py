"""The command line of ``gapless bench --server``, as one frozen value.

Owns names, defaults and limits. Called by `load`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gapless.bench.numbers import count, natural, positive
from gapless.bench.options import HelpWithDefaults

EXIT_CODES: Final = (
    "exit codes: 0 measured (what was refused or failed is in the table); 1 no request was "
    "answered; 2 wrong usage; 3 no server at the address; 130 interrupted"
)
OPEN_LOOP_WARM_UP: Final = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """One load on one server."""

    server: str
    admin: str | None
    rate: float | None
    """Requests a second, as Poisson arrivals: open loop."""
    concurrency: int | None
    """Requests at once: closed loop."""
    ramp_s: float
    """Over how long the streams of a closed loop begin."""
    seed: int
    requests: int | None
    """None: as many as the file has, or 256."""
    prompt: int
    new: int
    requests_file: Path | None
    flush_interval_ms: int | None
    text: bool
    timeout_s: float
    warm_up: int | None
    """Requests; None: as many as run at once, or OPEN_LOOP_WARM_UP."""
    target_ttft_ms: float | None
    target_itl_ms: float | None
    processes: int
    channels: int
    json: Path | None
    system_name: str
    run_id: str | None

    @property
    def warm_up_count(self) -> int:
        """Requests before the measured ones."""
        if self.warm_up is not None:
            return self.warm_up
        return self.concurrency or OPEN_LOOP_WARM_UP


def parse(arguments: Sequence[str]) -> LoadOptions:
    """Reads a command line.

    Raises:
        SystemExit: it is wrong (status 2) or asks for help (status 0).
    """
    parser = argparse.ArgumentParser(
        prog="gapless bench",
        description="Drives a running server over gRPC, and says what its clients see. "
        "All requests are greedy and go on to their full length.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
        formatter_class=HelpWithDefaults,
    )
    add = parser.add_argument
    add("--server", required=True, metavar="ADDRESS", help="of the server that runs")
    add("--admin", metavar="ADDRESS", help="its admin address: adds what its device did")
    _add_load(parser.add_argument_group("load"))
    group = parser.add_argument_group("targets of goodput")
    add = group.add_argument
    add("--target-ttft-ms", type=positive, metavar="MS", help="time to first token, at most")
    add("--target-itl-ms", type=positive, metavar="MS", help="mean time a token after, at most")
    group = parser.add_argument_group("generator")
    add = group.add_argument
    add("--processes", type=count, default=1, metavar="N", help="that share the load")
    add("--channels", type=count, default=4, metavar="N", help="connections of each process")
    group = parser.add_argument_group("results")
    add = group.add_argument
    add("--json", type=Path, metavar="FILE", help="write one object")
    add("--system-name", default="gapless", metavar="NAME", help="how the results name it")
    add("--run-id", metavar="ID", help="the same for all that is measured together")
    return LoadOptions(**vars(parser.parse_args(arguments)))


def _add_load(group: argparse._ArgumentGroup) -> None:
    loops = group.add_mutually_exclusive_group(required=True)
    loops.add_argument(
        "--rate", type=positive, metavar="R", help="open loop: R requests a second, Poisson"
    )
    loops.add_argument(
        "--concurrency", type=count, metavar="N", help="closed loop: N requests at once"
    )
    add = group.add_argument
    add(
        "--ramp-s",
        type=positive,
        default=0.0,
        metavar="S",
        help="closed loop: begin one after the other over this time, so that requests of one size "
        "do not come in waves",
    )
    add("--requests", type=count, metavar="N", help="in all; default 256, or the file's")
    add("--prompt", type=count, default=256, metavar="N", help="tokens each, drawn at random")
    add("--new", type=count, default=128, metavar="N", help="tokens each")
    add(
        "--requests-file",
        type=Path,
        metavar="FILE",
        help='instead: lines {"prompt": COUNT or [IDS], "new": COUNT}, over again if need be',
    )
    add("--seed", type=natural, default=0, metavar="N", help="of the arrivals")
    add(
        "--flush-interval-ms",
        type=natural,
        metavar="N",
        help="0 sends each token by itself; default: the server's",
    )
    add("--text", action=argparse.BooleanOptionalAction, default=True, help="else token ids")
    add("--timeout-s", type=positive, default=600.0, metavar="S", help="of each request")
    add(
        "--warm-up",
        type=natural,
        metavar="N",
        help=f"requests before; default: as many as run at once, or {OPEN_LOOP_WARM_UP}",
    )
