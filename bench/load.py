"""``gapless bench --server``: one load on one running server, from options to table and JSON.

Owns the order of things and the exit status. Called by `__main__`.

::

    model's facts ─▶ warm-up ─▶ statistics ─▶ the load ─▶ statistics ─▶ table, JSON

What gateway and scheduler add to the bare executor is told from *the same run*, by what the server
says of its device: see `load_report`. A second run of the same work against the bare executor was
the other choice. Its steps would not be those of this one (arrivals fall otherwise, so batches
differ), it would double the time, and each of the two would bring its own noise into a difference
of a millisecond.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from gapless.bench import generator, load_options, load_report, load_table, machine, work
from gapless.bench.arrivals import poisson, ramp, shares
from gapless.bench.calls import CallOptions
from gapless.bench.generator import GeneratorError
from gapless.bench.load_options import LoadOptions
from gapless.bench.outputs import OutputError, require_writable
from gapless.bench.work import Request, WorkError
from gapless.client import Client, GaplessError, NoServerError
from gapless.client.values import ModelInfo, ServerStats

MEASURED: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NO_SERVER: Final = 3
INTERRUPTED: Final = 130
REQUESTS_DEFAULT: Final = 256
ASK_TIMEOUT_S: Final = 10.0


def main(words: Sequence[str]) -> int:
    """Runs a load; its exit status."""
    chosen = load_options.parse(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _load(chosen, "gapless bench " + shlex.join(words))
    except (WorkError, OutputError) as error:
        print(f"gapless bench: {error}", file=sys.stderr)
        return USAGE
    except (GaplessError, GeneratorError, OSError) as error:
        print(f"gapless bench: {error}", file=sys.stderr)
        return NO_SERVER if isinstance(error, NoServerError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _load(chosen: LoadOptions, command: str) -> int:
    require_writable(chosen.json)
    model = asyncio.run(_model(chosen))
    asyncio.run(_stats(chosen))  # a wrong admin address shows before the warm-up
    requests = _requests(chosen, model.vocab_size)
    options = CallOptions(
        address=chosen.server,
        channel_count=chosen.channels,
        flush_interval_ms=chosen.flush_interval_ms,
        text=chosen.text,
        timeout_s=chosen.timeout_s,
    )
    _warm_up(chosen, options, requests, model.vocab_size)
    arrivals_s = None if chosen.rate is None else poisson(len(requests), chosen.rate, chosen.seed)
    starts_s = None if chosen.concurrency is None else ramp(chosen.concurrency, chosen.ramp_s)
    divided = shares(requests, arrivals_s, starts_s, chosen.processes)
    snapshots: list[ServerStats | None] = []
    print(f"load: {len(requests)} requests", file=sys.stderr, flush=True)
    driven = generator.drive(
        options, divided, lambda: snapshots.append(asyncio.run(_stats(chosen)))
    )
    snapshots.append(asyncio.run(_stats(chosen)))
    measured = load_report.Measured(driven, snapshots[0], snapshots[1])
    row = {
        "system": chosen.system_name,
        **load_report.row_of(chosen, model.name, requests, measured),
        "versions": machine.versions(),
        "command": command,
        "run_id": chosen.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}",
    }
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([row], indent=1) + "\n")
    print(load_table.table(row))
    return MEASURED if row["requests"]["completed"] else FAILED


def _requests(chosen: LoadOptions, vocab_size: int) -> tuple[Request, ...]:
    """Raises WorkError: the file holds none."""
    if chosen.requests_file is None:
        count = chosen.requests or REQUESTS_DEFAULT
        return work.batch(count, chosen.prompt, chosen.new, vocab_size).requests
    found = work.from_file(chosen.requests_file, vocab_size).requests
    return tuple(itertools.islice(itertools.cycle(found), chosen.requests or len(found)))


def _warm_up(
    chosen: LoadOptions, options: CallOptions, requests: tuple[Request, ...], vocab_size: int
) -> None:
    """The first requests, all at once, with other tokens and ever longer answers.

    So they become fewer one by one, and whatever an executor prepares for a number of rows when it
    first meets it is prepared then.
    """
    first = requests[: chosen.warm_up_count]
    if not first:
        return
    print(f"warm-up: {len(first)} requests", file=sys.stderr, flush=True)
    others = tuple(
        Request((each.prompt + 1) % vocab_size, max(1, each.new_tokens * number // len(first)))
        for number, each in enumerate(first, 1)
    )
    generator.drive(options, shares(others, None, ramp(len(others), 0.0), 1), lambda: None)


async def _model(chosen: LoadOptions) -> ModelInfo:
    async with Client(chosen.server, timeout_s=ASK_TIMEOUT_S) as client:
        with _named(f"server at {chosen.server}"):
            return await client.model()


async def _stats(chosen: LoadOptions) -> ServerStats | None:
    if chosen.admin is None:
        return None
    async with Client(chosen.server, admin_address=chosen.admin, timeout_s=ASK_TIMEOUT_S) as client:
        with _named(f"admin service at {chosen.admin}"):
            return await client.stats()


@contextmanager
def _named(peer: str) -> Iterator[None]:
    """Says which `peer` it was that does not answer: gRPC names none, or where it looked last."""
    try:
        yield
    except GaplessError as error:
        if isinstance(error, NoServerError) or error.code == "UNIMPLEMENTED":
            raise NoServerError(f"no {peer}: {error}", code=error.code) from error
        raise
