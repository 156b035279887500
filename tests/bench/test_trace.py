"""The form of a trace, and what it shows of a known log."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from gapless.bench import trace
from gapless.bench.measure import Run
from tests.bench.logs import step_log


def run_of(depth: int, count: int) -> Run:
    """A run whose device always waits 50 for the scheduler, 20 at the border, 10 for the launch."""
    moments = []
    now = 1_000_000
    for _ in range(count):
        stamps = (0, now + 20, now + 50, now + 70, now + 80, now + 1080, now + 1090, now + 1095)
        moments.append(stamps)
        now += 1080
    steps = step_log(moments)
    # What a step brought is there 15 after its result was taken, and kept 5 later.
    receipts = [(moment[-1] + 15, moment[-1] + 20, 2) for moment in moments]
    return Run(
        depth=depth,
        seconds=1.0,
        tokens=[],
        receipts=np.array(receipts, np.int64),
        steps=steps,
        clock_drift_ppm=0.0,
        steps_file=None,
        preemption_count=0,
        cpu_s={},
    )


def written(path: Path, *runs: Run, steps_max: int = 200) -> list[dict[str, Any]]:
    trace.write(path, runs, steps_max)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_tracks_are_in_order_and_slices_do_not_overlap(tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", run_of(1, 20), run_of(2, 20))
    end_us: dict[tuple[int, int], float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            track = event["pid"], event["tid"]
            assert event["ts"] >= end_us[track] - 1e-6, event
            assert event["dur"] >= 0
            end_us[track] = event["ts"] + event["dur"]
    assert len(end_us) == 8
    times = [event["ts"] for event in events if event["ph"] != "M" and event["pid"] == 1]
    assert times == sorted(times)


def test_bubbles_bear_their_cause(tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", run_of(1, 3))
    device = [
        (event["name"], round(1000 * event["dur"]))
        for event in events
        if event["ph"] == "X" and event["tid"] == trace.DEVICE
    ]
    bubble = [
        ("bubble: scheduler", 50),
        ("bubble: border and upload", 20),
        ("bubble: launch", 10),
    ]
    assert device == [*bubble, ("step 1", 1000), *bubble, ("step 2", 1000)]


def test_only_the_last_steps_are_shown(tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", run_of(1, 20), steps_max=4)
    steps = [event["name"] for event in events if event["name"].startswith("step ")]
    assert steps == ["step 16", "step 17", "step 18", "step 19"]


def test_updates_are_shown_where_they_arrive(tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", run_of(2, 20), steps_max=4)
    slices = [event for event in events if event["ph"] == "X"]
    updates = [event for event in slices if event["tid"] == trace.GATEWAY]
    takes = [event for event in slices if event["name"].startswith("take ")]
    # One more: what the step before the first one shown has brought.
    assert len(updates) == len(takes) + 1
    for take, update in zip(takes, updates[1:], strict=True):
        assert round(1000 * (update["ts"] - take["ts"] - take["dur"])) == 15
        assert (round(1000 * update["dur"]), update["name"]) == (5, "2 tokens")
        assert update["args"] == {"tokens": 2}


def test_arrows_are_whole(tmp_path: Path) -> None:
    events = written(tmp_path / "trace.json", run_of(1, 4))
    phases = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            phases[event["id"]].append(event["ph"])
    assert dict(phases) == {step: ["s", "t", "t", "f"] for step in (1, 2, 3)}
