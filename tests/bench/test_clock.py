"""Drift of the device's clock, found and taken out."""

from __future__ import annotations

import numpy as np
import pytest

from gapless.bench import clock
from gapless.protos.step_log import STEP_RECORD, Steps


def drifting(count: int, ppm: float) -> tuple[Steps, Steps]:
    """A log with true stamps, and the same seen through a clock that is slower by `ppm`."""
    draw = np.random.default_rng(0)
    true = np.zeros(count, STEP_RECORD)
    true["started_ns"] = 10**9 + 8_000_000 * np.arange(count)
    true["finished_ns"] = true["started_ns"] + 7_900_000
    true["received_ns"] = true["finished_ns"] + 60_000 + draw.exponential(50_000, count).astype(int)
    seen = true.copy()
    begin_ns = true["finished_ns"][0]
    for name in ("started_ns", "finished_ns"):
        seen[name] -= ((true[name] - begin_ns) * ppm / 1e6).astype(np.int64)
    return true, seen


@pytest.mark.parametrize("ppm", [-20.0, 0.0, 15.0])
def test_a_drift_is_found_and_taken_out(ppm: float) -> None:
    true, seen = drifting(8000, ppm)
    found = clock.drift_ppm(seen)
    assert found == pytest.approx(ppm, abs=0.2)
    fixed = clock.corrected(seen, found)
    assert np.abs(fixed["finished_ns"] - true["finished_ns"]).max() < 15_000


def test_a_short_run_says_nothing_of_drift() -> None:
    _, seen = drifting(100, 50.0)
    assert clock.drift_ppm(seen) == 0.0
    assert np.array_equal(clock.corrected(seen, 0.0), seen)
