"""``gapless bench``, or ``python -m gapless.bench``: measures, prints, writes.

With ``--server`` it is another program, `load`: then only a client's packages are there.

Owns the order of things and the exit status: 0 if all was measured, 1 if a run failed, 2 for wrong
usage, 4 if the depths did not give the same tokens, 130 if it was interrupted. The table goes to
stdout, progress to stderr.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn

from gapless.bench import machine, options, report, trace, work
from gapless.bench.measure import DepthRuns, measure
from gapless.bench.options import Options
from gapless.bench.outputs import OutputError, require_writable
from gapless.bench.server import ServerError
from gapless.bench.sizes import Model, ModelError, find_model
from gapless.bench.work import Work, WorkError

FAILED = 1
USAGE = 2
TOKENS_DIFFER = 4
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark; its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if any(word.partition("=")[0] == "--server" for word in words):
        from gapless.bench import load

        return load.main(words)
    chosen = options.parse(words)
    signal.signal(signal.SIGTERM, _leave)
    try:
        model = find_model(chosen.model)
        todo = _work(chosen, model)
        require_writable(chosen.json)
        require_writable(chosen.trace)
    except (ModelError, WorkError, OutputError) as error:
        print(f"gapless bench: {error}", file=sys.stderr)
        return USAGE
    try:
        return _bench(chosen, model, todo, "gapless bench " + shlex.join(words))
    except (ServerError, OSError) as error:
        print(f"gapless bench: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _leave(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _work(chosen: Options, model: Model) -> Work:
    if chosen.requests_file is not None:
        return work.from_file(chosen.requests_file, model.vocab_size)
    if chosen.mixed is not None:
        return work.mixed(chosen.mixed, model.vocab_size)
    return work.batch(chosen.batch, chosen.prompt, chosen.new, model.vocab_size)


def _bench(chosen: Options, model: Model, todo: Work, command: str) -> int:
    run_id = chosen.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    measured: list[DepthRuns] = []
    rows: list[dict[str, Any]] = []
    for depth in chosen.depth:
        runs = measure(chosen, model, todo, depth)
        measured.append(runs)
        origin = report.Origin(
            system=chosen.system_name,
            command=command,
            run_id=run_id,
            versions=machine.versions(),
            gpu=machine.device_name(runs.facts.device),
        )
        rows.extend(report.row_of(origin, chosen, model, todo, runs, run) for run in runs.runs)
    lines = _compare(measured, rows)
    if chosen.trace is not None:
        trace.write(chosen.trace, [each.runs[-1] for each in measured], chosen.trace_steps)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    # Files first: whoever reads the table may leave early.
    print("\n".join([*lines, report.table(rows)]))
    is_same = all(row["equal_tokens"]["requests"] == len(todo.requests) for row in rows)
    return 0 if is_same else TOKENS_DIFFER


def _compare(measured: Sequence[DepthRuns], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Compares every run's tokens with the first one's, notes it in its row; what to print."""
    runs = [run for depth_runs in measured for run in depth_runs.runs]
    lines = []
    for run, row in zip(runs, rows, strict=True):
        equal_count, first = report.difference(runs[0], run)
        row["equal_tokens"] = {"requests": equal_count, "of": len(run.tokens)}
        if first is not None:
            at = report.first_difference(runs[0].tokens[first], run.tokens[first])
            lines.append(
                f"tokens differ: depth {run.depth} from depth {runs[0].depth}: {equal_count} of "
                f"{len(run.tokens)} requests are equal, request {first} is not from token {at}"
            )
    if not lines and len(runs) > 1:
        lines.append(f"tokens: equal in all {len(runs)} runs, request by request")
    return lines


if __name__ == "__main__":
    sys.exit(main())
