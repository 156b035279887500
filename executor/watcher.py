"""Who notices that a step on the GPU has ended: the I/O thread itself, or one that wakes it.

Owns the watcher thread and the decision (`protos.wakeful` has the rule). Knows events, but not what
a step is. Called by `cuda_device`, from the I/O thread, about the oldest step in flight alone::

    the last step was short      the I/O thread asks the event between two looks at its socket
    it was long, or is late      the event is handed over; the watcher thread sleeps until it has
                                 come, then makes `wakeup` readable; nobody asks meanwhile
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from gapless.executor.device import Landings, StepError
from gapless.protos.messages import StepNumber
from gapless.protos.wakeful import Wakeful


class Event(Protocol):
    """What is needed of a `torch.cuda.Event`, made with ``blocking=True``."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Watcher:
    """Waits for one event after the other."""

    def __init__(self, core_count: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Starts the thread.

        Args:
            core_count: what the process may use.
            clock: tells nanoseconds.
        """
        self._clock = clock
        self._wakeful = Wakeful(core_count)
        self._landings = Landings()
        self._handed_over: SimpleQueue[tuple[StepNumber, Event] | None] = SimpleQueue()
        self._is_handed_over = False
        # Daemon: a process that is told to stop at once does not wait for a step.
        self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._thread.start()

    @property
    def wakeup(self) -> int:
        """File descriptor, readable once an event that was handed over has come."""
        return self._landings.wakeup

    def may_sleep(self, step: StepNumber, landed: Event) -> bool:
        """Whether the caller may sleep until `wakeup` is readable; else it asks again at once."""
        if not self._is_handed_over:
            if self._wakeful.stays_awake(self._clock()):
                return False
            self._is_handed_over = True
            self._handed_over.put((step, landed))
        return True

    def has(self, landed: Event) -> bool:
        """Whether the event has come; while it is handed over, whether the watcher says so.

        Raises:
            StepError: the device broke.
        """
        if self._is_handed_over:
            if not self._landings.take():
                return False
            self._is_handed_over = False
        try:
            return landed.query()
        except RuntimeError as error:
            raise StepError(f"{type(error).__name__}: {error}") from error

    def step_ended(self, step_ns: int) -> None:
        """The step that has just landed took the device so long."""
        self._wakeful.step_ended(step_ns, self._clock())

    def close(self) -> None:
        """Ends the thread, once what was handed over has come."""
        self._handed_over.put(None)
        self._thread.join()
        self._landings.close()

    def _watch(self) -> None:
        while (handed_over := self._handed_over.get()) is not None:
            step, landed = handed_over
            try:
                landed.synchronize()
            except Exception as error:  # not swallowed: `has` raises it in the I/O thread
                self._landings.tell(error)
                return
            self._landings.tell(step)
