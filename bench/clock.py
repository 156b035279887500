"""Brings the stamps of a GPU's timer back to the host's clock, from which it drifts.

The executor compares the two once, at its start. A crystal that is off by ten millionths moves the
stamps of a run of a minute by more than half a millisecond: nothing to a step's length, but much to
the question whether a frame was there before the device was free. A result is never known before it
is there, and the shortest time that it takes to be known does not change: so if the *least* delay
from the end of a step to its result changes steadily over a run, that is the drift. Called by
`measure`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from gapless.protos.step_log import Steps

WINDOWS: Final = 16
STEPS_A_WINDOW_MIN: Final = 50


def drift_ppm(steps: Steps) -> float:
    """How much the device's clock is slower than the host's, in millionths; 0 for short runs."""
    if len(steps) < WINDOWS * STEPS_A_WINDOW_MIN:
        return 0.0
    delay_ns = steps["received_ns"] - steps["finished_ns"]
    times, least = [], []
    for window in np.array_split(np.arange(len(steps)), WINDOWS):
        at = window[np.argmin(delay_ns[window])]
        times.append(float(steps["received_ns"][at] - steps["received_ns"][0]))
        least.append(float(delay_ns[at]))
    slope, _ = np.polyfit(times, least, 1)
    return float(slope * 1e6)


def corrected(steps: Steps, ppm: float) -> Steps:
    """A copy whose device stamps follow the host's clock, as it stood at the first step."""
    fixed = steps.copy()
    begin_ns = steps["finished_ns"][0] if len(steps) else 0
    for name in ("started_ns", "finished_ns"):
        fixed[name] += np.rint((steps[name] - begin_ns) * (ppm / 1e6)).astype(np.int64)
    return fixed
