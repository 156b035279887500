"""From the stamps of steps to where the device's time went: pure arithmetic on a step log.

What a gap is, and how it is cut into four parts, is written down in `protos.bubbles`. Called by
`report` and `trace`.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from gapless.protos.step_log import Steps

Nanoseconds = npt.NDArray[np.int64]

NEIGHBOURS: Final = 100
REGULAR_FACTOR: Final = 1.1


@dataclasses.dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps before the steps 1 .. n-1 of a sequence of n steps."""

    begin_ns: Nanoseconds
    """``[n-1]``: when the step before ended."""
    parts_ns: Nanoseconds
    """``[n-1, 4]``, in the order of `protos.bubbles.CAUSES`."""

    @property
    def total_ns(self) -> Nanoseconds:
        """``[n-1]``."""
        total: Nanoseconds = self.parts_ns.sum(axis=1)
        return total


def gaps_of(steps: Steps) -> Gaps:
    """The gaps between consecutive steps, ``[n]`` with n >= 1, all with a result."""
    begin = steps["finished_ns"][:-1]
    later = steps[1:]
    end = np.maximum(later["started_ns"], begin)
    idle_until = np.clip(later["idle_until_ns"], begin, end)
    published = np.clip(later["published_ns"], idle_until, end)
    accepted = np.clip(later["accepted_ns"], published, end)
    cuts = np.stack([begin, idle_until, published, accepted, end], axis=1)
    return Gaps(begin, np.diff(cuts, axis=1))


@dataclasses.dataclass(frozen=True, slots=True)
class HostPath:
    """How long the parts of the way from a result to a later frame took; one value a step."""

    wake_ns: Nanoseconds
    """The device ended the step -> the scheduler had read the word."""
    take_ns: Nanoseconds
    """-> the tokens stood in the logs."""
    build_ns: Nanoseconds
    """-> the frame that this result admitted was published. Steps that admitted one at once."""
    border_ns: Nanoseconds
    """Published -> accepted."""
    launch_ns: Nanoseconds
    """Accepted -> started. Steps that found the device idle."""


def host_path(steps: Steps, depth: int) -> HostPath:
    """The host's part in steps ``[n]`` at `depth`; of the first one only its end counts."""
    own = steps[1:]
    result, frame = own[: max(len(own) - depth, 0)], own[depth:]
    at_once = frame["built_from_ns"] >= result["taken_ns"]
    found_idle = steps["finished_ns"][:-1] <= own["accepted_ns"]
    return HostPath(
        wake_ns=own["received_ns"] - own["finished_ns"],
        take_ns=own["taken_ns"] - own["received_ns"],
        build_ns=(frame["published_ns"] - result["taken_ns"])[at_once],
        border_ns=own["accepted_ns"] - own["published_ns"],
        launch_ns=(own["started_ns"] - own["accepted_ns"])[found_idle],
    )


def decode_periods_ns(steps: Steps) -> Nanoseconds:
    """From start to start of consecutive steps that only decode; the first step does not count."""
    own = steps[1:]
    decodes = own["row_count"] == own["token_count"]
    period: Nanoseconds = np.diff(own["started_ns"])[decodes[1:] & decodes[:-1]]
    return period


def regular_share(period_ns: Nanoseconds) -> float | None:
    """Share of the steps that took at most REGULAR_FACTOR times the median of their neighbours.

    Neighbours of a step are the NEIGHBOURS others that are nearest to it in ``[n]``: half of them
    on each side, or more on the one where there are enough. So a time that grows with the context
    does not count, and a step that stands out does. None: too few steps.
    """
    last = len(period_ns) - 1 - NEIGHBOURS
    if last < 0:
        return None
    places = np.arange(len(period_ns))
    begin = np.clip(places - NEIGHBOURS // 2, 0, last)
    windows = sliding_window_view(period_ns, NEIGHBOURS + 1)[begin]
    others = np.arange(NEIGHBOURS + 1) != (places - begin)[:, None]
    medians = np.median(windows[others].reshape(-1, NEIGHBOURS), axis=1)
    return float((period_ns <= REGULAR_FACTOR * medians).mean())
