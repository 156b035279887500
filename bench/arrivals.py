"""When which request is sent, and by which process of the generator.

Everything comes from a seed, and the division into processes changes nothing of the whole. Knows
nothing of clocks or sockets. Called by `load`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gapless.bench.work import Request

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What one process sends."""

    requests: tuple[Request, ...]
    arrivals_s: Floats | None
    """Open loop: when each is to be sent, after the start."""
    starts_s: tuple[float, ...]
    """Closed loop: when each stream begins; it sends a next request when one has ended."""


def poisson(count: int, rate: float, seed: int) -> Floats:
    """Times of `count` arrivals at `rate` a second, ``[count]`` in seconds; the first at 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    gaps[:1] = 0.0
    return np.cumsum(gaps)


def ramp(concurrency: int, ramp_s: float) -> list[float]:
    """When each of the streams of a closed loop begins: evenly over `ramp_s`."""
    return [ramp_s * number / concurrency for number in range(concurrency)]


def shares(
    requests: tuple[Request, ...],
    arrivals_s: Floats | None,
    starts_s: Sequence[float] | None,
    process_count: int,
) -> list[Share]:
    """Divides a load; there are no more shares than there is work for."""
    assert (arrivals_s is None) != (starts_s is None), "either an open or a closed loop"
    count = min(process_count, len(requests), len(requests if starts_s is None else starts_s))
    return [
        Share(
            requests[number::count],
            None if arrivals_s is None else arrivals_s[number::count],
            () if starts_s is None else tuple(starts_s[number::count]),
        )
        for number in range(count)
    ]
