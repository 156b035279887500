"""Whole runs a person can read: every transcript in ``tests/scenarios`` still comes true.

After a change that is meant: ``GAPLESS_REWRITE=1 pytest tests/scheduler/test_scenarios.py``, and
read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scheduler.transcript import replay

FOLDER = Path(__file__).parent.parent / "scenarios"
SCENARIOS = sorted(path.stem for path in FOLDER.glob("*.txt"))


def test_there_are_scenarios() -> None:
    assert SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_transcript_comes_true(name: str) -> None:
    path = FOLDER / f"{name}.txt"
    before = path.read_text()
    after = replay(before)
    if os.environ.get("GAPLESS_REWRITE"):
        path.write_text(after)
    assert after == before or os.environ.get("GAPLESS_REWRITE")
