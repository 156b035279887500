"""What the link drives: a device that accepts frames and gives results back, two steps deep.

Owns the order of a step's three stages and the hand-overs between them. Knows nothing of sockets
and words, nor of what a step computes. Called by the link, from the process's main thread (the
*I/O thread*), which never waits for a step: it is told by a file descriptor, or asks.

One step's way, and where each stage runs::

    stage     CpuDevice                          CUDA form
    h2d       I/O thread, in `accept`            copy on the h2d stream, event `staged[slot]`
    compute   the one compute thread             compute stream, waits for `staged[slot]`: the
                                                 graphs of this slot; event `computed[slot]`
    d2h       compute thread, behind compute     d2h stream, waits for `computed[slot]`: copy to
                                                 the pinned result slot; event `landed[slot]`
    wake      compute thread writes `wakeup`     I/O thread asks `landed[slot]` where steps are
                                                 short, else a watcher waits, writes `wakeup`

Everything a step owns is there twice, chosen by step % 2: the step slot (shared memory), the
staging slot (the device's copy of the frame), the output buffer (sampled tokens, from which the
next step carries over; read after the step ended, so outside anything that is reused) and the
result slot (shared memory).
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections import deque
from collections.abc import Callable

from gapless.protos.messages import Attach, StepNumber
from gapless.protos.seats import Int32s
from gapless.protos.slots import NO_CARRY, Frame, FrameSlots, ResultSlots


@dataclasses.dataclass(frozen=True, slots=True)
class Regions:
    """The shared memory of an epoch, mapped."""

    frames: FrameSlots
    results: ResultSlots
    seat_table: Int32s
    """``[seat_count, words]``; what the scheduler has written when it says `Attach`."""


class StepError(Exception):
    """The device broke while it ran a step; the cause is chained. No further step may run."""


class Device(abc.ABC):
    """Runs the steps of one epoch in the order in which they are accepted."""

    @property
    @abc.abstractmethod
    def wakeup(self) -> int:
        """File descriptor, readable once `finished` has something to say: see `may_sleep`."""

    @property
    @abc.abstractmethod
    def in_flight(self) -> int:
        """Steps accepted whose result `finished` has not returned yet, at most 2."""

    @abc.abstractmethod
    def accept(self, step: StepNumber) -> None:
        """Reads and asserts the frame of `step`, and queues it; waits for nothing.

        The caller vouches that fewer than two steps are in flight. When this returns, the copy to
        the staging slot has been issued, and the step slot stays as it is until the result.
        """

    def may_sleep(self) -> bool:
        """Asked before each sleep: if True, `wakeup` will tell of the next result.

        If False, it is so near that the caller had better ask `finished` again and again.
        """
        return True

    @abc.abstractmethod
    def finished(self) -> tuple[StepNumber, ...]:
        """The steps whose results have landed in their result slots since the last call, in order.

        Raises:
            StepError: the device broke.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the device's threads once the accepted steps are through."""


class Landings:
    """What has landed: told by the thread that knows, taken by the I/O thread."""

    def __init__(self) -> None:
        self._landed: deque[StepNumber | Exception] = deque()
        self.wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable while `take` has something to say."""

    def tell(self, landed: StepNumber | Exception) -> None:
        """A step's result stands in its result slot; or why no further one will."""
        self._landed.append(landed)
        os.eventfd_write(self.wakeup, 1)

    def take(self) -> tuple[StepNumber, ...]:
        """What was told since the last call, in order.

        Raises:
            StepError: an exception was told; the steps before it come first, in an earlier call.
        """
        try:
            os.eventfd_read(self.wakeup)
        except BlockingIOError:
            return ()
        steps: list[StepNumber] = []
        while self._landed:
            landed = self._landed[0]
            if isinstance(landed, Exception):
                if not steps:
                    raise StepError(f"{type(landed).__name__}: {landed}") from landed
                os.eventfd_write(self.wakeup, 1)  # the steps before it first, the fault next time
                break
            self._landed.popleft()
            steps.append(landed)
        return tuple(steps)

    def close(self) -> None:
        """Gives the descriptor back; nothing may be told any more."""
        os.close(self.wakeup)


def check_carry(frame: Frame, previous_row_count: int | None) -> None:
    """Asserts that carried rows name rows of the step before; None: `frame` is the first."""
    carry_max = int(frame.rows.carry_row.max())
    if carry_max != NO_CARRY:
        assert previous_row_count is not None, "the first step of an epoch carries nothing over"
        assert carry_max < previous_row_count, (carry_max, previous_row_count)


StartDevice = Callable[[Attach, Regions], Device]
"""Starts the device of an epoch: uploads its seat table, makes it ready for steps."""
