"""One depth: a server, a warm-up, and the measured runs of the same work.

Owns the order of things. Called by `__main__`, which compares depths.

All requests are queued before the first step of a run is built, so that every run has the same
steps, whatever the timing of arrivals. For that the executor is frozen while a small *gate*
request fills the pipeline; then the work is submitted and admitted, and the executor goes on.
The clock of a run starts with the first submission and ends with the last token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from gapless.bench import clock
from gapless.bench.link import Link, Outcome, Receipts, check_complete
from gapless.bench.machine import device_memory_bytes
from gapless.bench.options import Options
from gapless.bench.server import Process, Server, running
from gapless.bench.sizes import Model
from gapless.bench.work import Request, Tokens, Work
from gapless.protos.messages import ModelFacts
from gapless.protos.step_log import Steps, read_step_log

TOKEN_MAX: Final = 8192
SPARE_TOKENS: Final = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One measured run of the work."""

    depth: int
    seconds: float
    tokens: list[Tokens]
    """Of each request."""
    receipts: Receipts
    """Of the updates that the stand-in of a gateway received."""
    steps: Steps
    """The gate's last step, and behind it those of the run; on the host's clock."""
    clock_drift_ppm: float
    """What was corrected for that."""
    steps_file: Path | None
    """Where `steps` were kept."""
    preemption_count: int
    cpu_s: dict[str, float]
    """Processor time by process; ``bench`` is the stand-in of a gateway."""


@dataclasses.dataclass(frozen=True, slots=True)
class DepthRuns:
    """Everything that was measured at one depth."""

    depth: int
    facts: ModelFacts
    start_s: float
    peak_resident_bytes: dict[str, int]
    device_memory_bytes: int | None
    """Of the whole GPU, at the end, with everything that uses it."""
    executor_log: str
    runs: tuple[Run, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Timed:
    """A run before its steps are known."""

    seconds: float
    resumed_ns: int
    ended_ns: int
    tokens: list[Tokens]
    receipts: Receipts
    preemption_count: int
    cpu_s: dict[str, float]


def measure(options: Options, model: Model, work: Work, depth: int) -> DepthRuns:
    """Starts a server at `depth`, and runs the work as often as asked.

    Raises:
        ServerError: the server or a request failed.
    """
    warm_up = work.warm_up(model.vocab_size) if options.warm_up else None
    with contextlib.ExitStack() as stack:
        if options.raw is None:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gapless-bench-")))
        else:
            logs = options.raw / f"depth{depth}"
            logs.mkdir(parents=True, exist_ok=True)
        scheduler_flags = _scheduler_flags(options, work, depth, logs)
        executor_flags = _executor_flags(options, model, work, warm_up)
        _say(f"depth {depth}: starting scheduler and executor")
        with running(scheduler_flags, executor_flags, logs, options.start_timeout_s) as server:
            _say(f"depth {depth}: ready after {server.start_s:.1f} s")
            facts, timed = _run_all(server, options, model, work, warm_up, depth)
            peak = {each.name: each.peak_resident_bytes() for each in server.processes}
            memory_bytes = device_memory_bytes() if facts.device.startswith("cuda") else None
            server.stop()
        steps = read_step_log(logs / "steps.npy")
        return DepthRuns(
            depth=depth,
            facts=facts,
            start_s=server.start_s,
            peak_resident_bytes=peak,
            device_memory_bytes=memory_bytes,
            executor_log=(logs / "executor.log").read_text(errors="replace"),
            runs=tuple(
                _with_steps(depth, each, steps, options.raw and logs / f"run{number}.npy", facts)
                for number, each in enumerate(timed, 1)
            ),
        )


def _run_all(
    server: Server, options: Options, model: Model, work: Work, warm_up: Work | None, depth: int
) -> tuple[ModelFacts, list[_Timed]]:
    link = Link(server.run_folder, server.processes)
    try:
        facts = link.greet(model).facts
        if warm_up is not None:
            begin_s = time.monotonic()
            _run(link, server.processes, warm_up, depth)
            _say(f"depth {depth}: warm after {time.monotonic() - begin_s:.1f} s")
        timed = []
        for number in range(1, options.repeats + 1):
            timed.append(_run(link, server.processes, work, depth))
            _say(f"depth {depth}: run {number} of {options.repeats}: {timed[-1].seconds:.2f} s")
        return facts, timed
    finally:
        link.close()


def _run(link: Link, processes: tuple[Process, Process], work: Work, depth: int) -> _Timed:
    executor = processes[1]
    gate, outcome = Outcome(), Outcome()
    executor.freeze()
    # As many steps as the pipeline holds: the next one can be built when the first is done.
    link.submit([Request(np.zeros(1, np.int32), depth)])
    link.collect(gate, lambda: gate.started_count == 1)
    cpu_before_s = _cpu_s(processes)
    begin_ns = time.monotonic_ns()
    handles = link.submit(work.requests)
    link.collect(outcome, lambda: outcome.admitted_count == len(handles))
    resumed_ns = time.monotonic_ns()
    executor.resume()
    # The gate's own end comes first, in the same stream of updates.
    link.collect(outcome, lambda: len(outcome.finished) == len(handles) + 1)
    tokens = outcome.tokens_of(handles)
    check_complete(work.requests, tokens, outcome)
    return _Timed(
        seconds=(outcome.ended_ns - begin_ns) / 1e9,
        resumed_ns=resumed_ns,
        ended_ns=outcome.ended_ns,
        tokens=tokens,
        receipts=outcome.receipts(),
        preemption_count=sum(event.preemption_count for event in outcome.finished),
        cpu_s={name: spent - cpu_before_s[name] for name, spent in _cpu_s(processes).items()},
    )


def _with_steps(
    depth: int, timed: _Timed, steps: Steps, keep: Path | None, facts: ModelFacts
) -> Run:
    """Finds the steps of a run: published after the executor went on, and the one before."""
    begin = int(np.searchsorted(steps["published_ns"], timed.resumed_ns))
    end = int(np.searchsorted(steps["published_ns"], timed.ended_ns))
    own = steps[begin - 1 : end]
    own = own[own["taken_ns"] > 0]
    drift_ppm = clock.drift_ppm(own) if facts.device.startswith("cuda") else 0.0
    own = clock.corrected(own, drift_ppm)
    if keep is not None:
        np.save(keep, own)
    return Run(
        depth=depth,
        seconds=timed.seconds,
        tokens=timed.tokens,
        receipts=timed.receipts,
        steps=own,
        clock_drift_ppm=drift_ppm,
        steps_file=keep,
        preemption_count=timed.preemption_count,
        cpu_s=timed.cpu_s,
    )


def _cpu_s(processes: Sequence[Process]) -> dict[str, float]:
    return {**{each.name: each.cpu_s() for each in processes}, "bench": time.process_time()}


def _scheduler_flags(options: Options, work: Work, depth: int, logs: Path) -> list[str]:
    return [
        *("--depth", str(depth)),
        *("--running-max", str(_seats(options, work))),
        *("--queued-max", str(len(work.requests) + 1)),
        *("--step-log", str(logs.absolute() / "steps.npy")),
        *options.scheduler_args,
    ]


def _seats(options: Options, work: Work) -> int:
    """One more than requests where all run at once: at depth 2 the gate still has its own then."""
    running_max = options.running_max or work.running_max
    return running_max + 1 if running_max >= len(work.requests) else running_max


def _executor_flags(options: Options, model: Model, work: Work, warm_up: Work | None) -> list[str]:
    seats = _seats(options, work)
    length_max = max(each.length_max for each in (work, warm_up) if each is not None)
    token_max = options.token_max or min(TOKEN_MAX, work.prompt_tokens)
    return [
        *("--model", model.source),
        *("--device", options.device),
        *("--dtype", options.dtype),
        *("--attention", options.attention),
        *("--row-max", str(seats)),
        *("--token-max", str(max(token_max, seats))),
        *("--context-length-max", str(length_max + SPARE_TOKENS)),
        *options.executor_args,
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
