"""The gateway's event loop: asyncio's own, with fewer empty turns.

grpc.aio's thread writes one byte to a socket for each operation that has completed, and its reader
takes one byte a turn, though it then does all that has completed. A step's writes so leave as many
turns that do nothing as there are streams: a tenth of what a token costs. This loop takes all bytes
but the last before the reader is called. A byte stands for nothing but "look", and is written after
what it announces, so nothing is missed.

Must not know: what the loop is used for. Called by `__main__`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final, TypeVarTuple

WAKEUPS_MAX: Final = 4096
"""Bytes taken at once."""

_Arguments = TypeVarTuple("_Arguments")


class EventLoop(asyncio.SelectorEventLoop):
    """See the module. Only grpc.aio gives `add_reader` a socket; others give a descriptor."""

    def add_reader(
        self, fd: Any, callback: Callable[[*_Arguments], Any], *args: *_Arguments
    ) -> None:
        """As asyncio's."""
        if isinstance(fd, socket.socket):
            super().add_reader(fd, _read_all, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def _read_all(
    wakeups: socket.socket, callback: Callable[[*_Arguments], Any], *args: *_Arguments
) -> None:
    count = len(wakeups.recv(WAKEUPS_MAX, socket.MSG_PEEK))
    if count > 1:
        wakeups.recv(count - 1)
    callback(*args)
