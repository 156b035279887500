"""SIGTERM and SIGINT as things to poll for: the first asks to drain, the second to leave at once.

Owns the process's handlers of both. Called by `__main__` (install, while nothing is served yet)
and by the link (poll, count).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from types import FrameType
from typing import Final

_COUNTED: Final = (signal.SIGTERM, signal.SIGINT)
INTERRUPTED: Final = 130
"""Exit status of a process that SIGINT ended, as shells count it."""


class Signals:
    """Counts the two signals; one that comes before `serve` ends the process."""

    def __init__(self) -> None:
        self._count = 0
        self._serving = False
        self._wakeup, self._signal_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._signal_end, warn_on_full_buffer=False)
        for number in _COUNTED:
            signal.signal(number, self._on_signal)

    @property
    def wakeup(self) -> int:
        """File descriptor, readable once a signal came since the last `take`."""
        return self._wakeup

    def serve(self) -> None:
        """From now on signals are counted for `take`; until then the first ends the process."""
        self._serving = True

    def take(self) -> int:
        """How many signals came so far; makes `wakeup` unreadable."""
        with contextlib.suppress(BlockingIOError):
            # One byte a signal, its number: nothing is lost or seen early.
            came = os.read(self._wakeup, 4096)
            self._count += sum(number in _COUNTED for number in came)
        return self._count

    def ignore(self) -> None:
        """From now on neither signal ends the process: its exit status is decided.

        Without this, one that comes while the interpreter shuts down would kill it.
        """
        for number in _COUNTED:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._serving:
            # Loading: there is nothing to drain, and the thread that loads is not waited for.
            logging.shutdown()
            os._exit(0 if number == signal.SIGTERM else INTERRUPTED)
