"""The parts of a start, and the line that `gapless bench` reads."""

from __future__ import annotations

from gapless.bench.report import start_phases_s
from gapless.executor.phases import Phases


def test_parts_follow_each_other_and_pieces_add_up() -> None:
    moments = iter([10.0, 12.0, 12.5, 13.0, 20.0])
    start = Phases(lambda: next(moments))
    for name in ("imports", "KV pool", "graphs", "KV pool"):
        start.end(name)
    assert start.line() == "ready after 10.00 s: imports 2.00, KV pool 7.50, graphs 0.50"
    assert start_phases_s(f"x {start.line()}\ny") == {
        "imports": 2.0,
        "KV pool": 7.5,
        "graphs": 0.5,
    }
