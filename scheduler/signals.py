"""Signals as something to poll.

Owns a pipe and the handlers of SIGTERM and SIGINT. Called by `__main__`, read by `loop`.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Final

WAKEUP_BYTES_MAX: Final = 64


class Signals:
    """Collects SIGTERM and SIGINT; make one, in the main thread."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave_it_to_the_pipe)

    @property
    def source(self) -> int:
        """What to poll: a descriptor that is readable when a signal came."""
        return self._reader

    def take(self) -> list[signal.Signals]:
        """The signals that came since the last call."""
        try:
            numbers = os.read(self._reader, WAKEUP_BYTES_MAX)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers]


def _leave_it_to_the_pipe(_number: int, _frame: FrameType | None) -> None:
    """Python writes the number into the pipe before it calls this."""
