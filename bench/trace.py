"""A picture of steps for chrome://tracing and ui.perfetto.dev: where the overlap can be seen.

Owns the form of the file (Trace Event Format, JSON): one process a depth with four tracks, all on
one clock that begins with the first step shown. Called by `__main__`. ::

    gateway (bench)                       | 32 tokens |
    scheduler   | take N-1 | build N+1 |        | take N | build N+2 |
    executor                           | accept N+1 |                | accept N+2 |
    device      ███████ N ███████| bubble: ... |███████ N+1 ███████

Arrows follow a step: from the build of its frame to its acceptance, to the device, to the taking of
its result. The benchmark plays the gateway: its slices are updates, from their arrival until they
are kept.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from gapless.bench import bubbles
from gapless.bench.link import Receipts
from gapless.bench.measure import Run
from gapless.protos.bubbles import CAUSES
from gapless.protos.step_log import STEP_RECORD, Steps

GATEWAY: Final = 1
SCHEDULER: Final = 2
EXECUTOR: Final = 3
DEVICE: Final = 4
TRACKS: Final = {
    GATEWAY: "gateway (bench)",
    SCHEDULER: "scheduler",
    EXECUTOR: "executor",
    DEVICE: "device",
}
COLOURS: Final = dict(
    zip(CAUSES, ("grey", "terrible", "bad", "yellow"), strict=True),
)
"""Chrome's names; Perfetto chooses its own by the name of the slice."""

Event = dict[str, Any]


def write(path: Path, runs: Sequence[Run], steps_max: int) -> None:
    """Writes the last steps, at most `steps_max`, of each run.

    Raises:
        OSError: the file cannot be written.
    """
    events: list[Event] = []
    for number, run in enumerate(runs, 1):
        events.extend(_names(number, f"depth {run.depth}"))
        events.extend(_events(number, run.steps[-steps_max - 1 :], run.receipts))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _names(process: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    for track, label in TRACKS.items():
        where = {"ph": "M", "pid": process, "tid": track}
        yield {**where, "name": "thread_name", "args": {"name": label}}
        yield {**where, "name": "thread_sort_index", "args": {"sort_index": track}}


def _events(process: int, steps: Steps, receipts: Receipts) -> list[Event]:
    """Slices and arrows of steps; of the first one only the end counts. Ordered by time."""
    assert steps.dtype == STEP_RECORD, steps.dtype
    records = [dict(zip(STEP_RECORD.names or (), each, strict=True)) for each in steps.tolist()]
    begin_ns = min(records[0]["finished_ns"], *(each["built_from_ns"] for each in records))
    shown = receipts[receipts[:, 0] >= records[0]["taken_ns"]]
    slices = [*_step_slices(records), *_bubble_slices(steps), *_update_slices(shown)]
    arrows = _arrows(records)
    events = [
        {
            **event,
            "pid": process,
            "ts": (event["ts"] - begin_ns) / 1e3,
            **({"dur": event["dur"] / 1e3} if "dur" in event else {}),
        }
        for event in (*slices, *arrows)
    ]
    return sorted(events, key=lambda event: (event["ts"], event["ph"] != "X"))


def _slice(track: int, name: str, begin_ns: int, end_ns: int, **args: int) -> Event:
    duration_ns = max(end_ns - begin_ns, 0)
    return {"ph": "X", "tid": track, "name": name, "ts": begin_ns, "dur": duration_ns, "args": args}


def _step_slices(records: Sequence[dict[str, int]]) -> Iterator[Event]:
    for before, each in itertools.pairwise(records):
        step = each["step"]
        yield _slice(SCHEDULER, f"build {step}", each["built_from_ns"], each["published_ns"])
        yield _slice(SCHEDULER, f"take {step}", each["received_ns"], each["taken_ns"])
        # Its word may have waited for the one before.
        accept_from = max(each["published_ns"], before["accepted_ns"])
        yield _slice(EXECUTOR, f"accept {step}", accept_from, each["accepted_ns"])
        yield _slice(
            *(DEVICE, f"step {step}", each["started_ns"], each["finished_ns"]),
            rows=each["row_count"],
            tokens=each["token_count"],
            context_tokens=each["context_tokens"],
        )


def _update_slices(receipts: Receipts) -> Iterator[Event]:
    for arrived_ns, kept_ns, token_count in receipts.tolist():
        name = f"{token_count} tokens" if token_count else "events"
        yield _slice(GATEWAY, name, arrived_ns, kept_ns, tokens=token_count)


def _bubble_slices(steps: Steps) -> Iterator[Event]:
    gaps = bubbles.gaps_of(steps)
    for begin, parts in zip(gaps.begin_ns.tolist(), gaps.parts_ns.tolist(), strict=True):
        for cause, duration in zip(CAUSES, parts, strict=True):
            if duration > 0:
                name = cause if cause == CAUSES[0] else f"bubble: {cause}"
                yield {**_slice(DEVICE, name, begin, begin + duration), "cname": COLOURS[cause]}
            begin += duration


def _arrows(records: Sequence[dict[str, int]]) -> Iterable[Event]:
    """Each ends in a slice; where it begins, that slice is about to end."""
    for before, each in itertools.pairwise(records):
        accept_from = max(each["published_ns"], before["accepted_ns"])
        way = (
            (SCHEDULER, _late(each["built_from_ns"], each["published_ns"])),
            (EXECUTOR, _late(accept_from, each["accepted_ns"])),
            (DEVICE, _late(each["started_ns"], each["finished_ns"])),
            (SCHEDULER, each["received_ns"]),
        )
        for phase, (track, at_ns) in zip(("s", "t", "t", "f"), way, strict=True):
            arrow = {"ph": phase, "tid": track, "name": "step", "cat": "step", "id": each["step"]}
            yield {**arrow, "ts": at_ns, "bp": "e"}


def _late(begin_ns: int, end_ns: int) -> int:
    return begin_ns + max(end_ns - begin_ns, 0) * 9 // 10
