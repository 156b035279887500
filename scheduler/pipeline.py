"""The steps in flight: how many, which numbers, and what each of them may touch.

Owns step numbers and the epoch. It must not know what rows mean. The core publishes and
acknowledges through it::

    step N     published ████████ acknowledged
    step N+1            published ████████ acknowledged      depth 2: N+2 only after result N
    slot       N % 2    (N+1) % 2
"""

from __future__ import annotations

import dataclasses
from collections import deque

from gapless.protos.messages import Epoch, StepNumber
from gapless.protos.seats import Int32s
from gapless.scheduler.seats import Bools, Indices


@dataclasses.dataclass(frozen=True, slots=True)
class Flight:
    """A published step, as its result will be read: columns ``[row_count]``."""

    step: StepNumber
    seats: Indices
    context_length: Int32s
    samples: Bools | None
    """Rows that get a token; None if all do."""


class Pipeline:
    """Steps published and not acknowledged, oldest first.

    Step numbers start at 0 and go up by one over all epochs, so a number names one step for life.
    """

    def __init__(self, depth: int, epoch: Epoch) -> None:
        self._depth = depth
        self.epoch = epoch
        self.next_step = StepNumber(0)
        self.flights: deque[Flight] = deque()

    @property
    def published_step(self) -> int:
        """The last step published; -1 if there was none."""
        return self.next_step - 1

    @property
    def is_full(self) -> bool:
        """Whether the fence forbids another step."""
        return len(self.flights) >= self._depth

    def publish(self, flight: Flight) -> None:
        assert not self.is_full, f"{len(self.flights)} steps in flight at depth {self._depth}"
        assert flight.step == self.next_step, (flight.step, self.next_step)
        self.flights.append(flight)
        self.next_step = StepNumber(self.next_step + 1)

    def acknowledge(self, step: StepNumber) -> Flight:
        """Takes the oldest step, which must be `step`: results come in order, once each."""
        assert self.flights, f"result of step {step}, none is in flight"
        flight = self.flights.popleft()
        assert flight.step == step, f"result of step {step} before that of {flight.step}"
        return flight

    def reset(self, epoch: Epoch) -> None:
        """The executor and all its steps in flight are gone; a new one begins."""
        assert epoch > self.epoch, f"epoch {epoch} after {self.epoch}"
        self.epoch = epoch
        self.flights.clear()
