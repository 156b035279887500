"""Totals since the start, rates over the last seconds, and how long the device worked.

Owns counters, decides nothing. The core counts into it; `Core.stats` reads it.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import deque
from typing import Final

from gapless.protos.bubbles import STEP_BOUNDS_US
from gapless.protos.slots import Result
from gapless.scheduler.request import Sequence

WINDOW_S: Final = 10
"""Length of the time over which rates are taken."""


@dataclasses.dataclass(slots=True)
class Totals:
    """Counts since the start."""

    requests: int = 0
    rejected: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0


@dataclasses.dataclass(slots=True)
class _Second:
    second: int
    steps: int = 0
    step_ns: int = 0
    tokens: int = 0
    ended: int = 0


class Window:
    """Sums over the last `WINDOW_S` seconds, in buckets of a second."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()

    def add_step(self, now: float, step_ns: int, tokens: int) -> None:
        """A result: how long the device computed, how many tokens it brought."""
        bucket = self._bucket(now)
        bucket.steps += 1
        bucket.step_ns += step_ns
        bucket.tokens += tokens

    def add_ended(self, now: float) -> None:
        """A sequence ended, so that there is room for another one."""
        self._bucket(now).ended += 1

    def tokens_per_second(self, now: float) -> float:
        return sum(each.tokens for each in self._recent(now)) / WINDOW_S

    def mean_step_s(self, now: float) -> float:
        """Mean time of a step on the device; 0 if there was none."""
        steps = sum(each.steps for each in self._recent(now))
        return sum(each.step_ns for each in self._recent(now)) / steps / 1e9 if steps else 0.0

    def ended_per_second(self, now: float) -> float:
        return sum(each.ended for each in self._recent(now)) / WINDOW_S

    def _bucket(self, now: float) -> _Second:
        second = int(now)
        if not self._seconds or self._seconds[-1].second < second:
            self._seconds.append(_Second(second))
            self._recent(now)
        return self._seconds[-1]

    def _recent(self, now: float) -> deque[_Second]:
        while self._seconds and self._seconds[0].second <= now - WINDOW_S:
            self._seconds.popleft()
        return self._seconds


class Work:
    """The device's own time: what is left of any latency when nothing else costs any."""

    def __init__(self) -> None:
        self.token_counts = [0] * (len(STEP_BOUNDS_US) + 1)
        """Tokens by the length of the step that gave them, in the buckets of STEP_BOUNDS_US.

        First tokens aside: there is no other one that they come after.
        """
        self._first_count = 0
        self._total_ns = 0
        self._arrived: list[Sequence] = []
        """Sequences that came while the step ran whose result is not there yet."""

    def arrived(self, sequence: Sequence) -> None:
        """A sequence was admitted."""
        sequence.device_from_ns = self._total_ns
        self._arrived.append(sequence)

    def step(self, result: Result, behind_ns: int) -> None:
        """A step was taken; what it did before a sequence came is not that sequence's time.

        `behind_ns`: how far the clock of the device's stamps has fallen behind the host's.
        """
        self._total_ns += result.finished_ns - result.started_ns
        if not self._arrived:
            return
        started, finished = result.started_ns + behind_ns, result.finished_ns + behind_ns
        waiting = []
        for sequence in self._arrived:
            before_ns = min(int(sequence.admitted_s * 1e9), finished) - started
            if before_ns > 0:
                sequence.device_from_ns += before_ns
                waiting.append(sequence)
        self._arrived = waiting

    def gave(self, result: Result, token_count: int) -> None:
        """It gave so many tokens, some of which were told of by `first_token`."""
        later_count, self._first_count = token_count - self._first_count, 0
        step_us = (result.finished_ns - result.started_ns) / 1000
        self.token_counts[bisect_left(STEP_BOUNDS_US, step_us)] += later_count

    def first_token(self, sequence: Sequence) -> None:
        """The step gave a sequence its first: notes how long the device computed since it came."""
        sequence.device_s = (self._total_ns - sequence.device_from_ns) / 1e9
        self._first_count += 1
