"""Makes sure that an event loop which waits is woken by a signal.

Python notes a signal and runs its handler later, in the main thread. Where the kernel gives the
signal to another thread (gRPC has some), or just before the loop begins to wait, nothing ends that
wait, and a Ctrl-C would have no effect until the next token comes. Called by whoever runs a loop
that Ctrl-C must end; must not know what runs in it.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

READ_BYTES_MAX: Final = 4096


@contextlib.contextmanager
def woken_by_signals(loop: AbstractEventLoop) -> Iterator[None]:
    """While it lasts, any signal with a handler wakes `loop`; enter it in the main thread."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        loop.add_reader(reader, reader.recv, READ_BYTES_MAX)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(reader)
