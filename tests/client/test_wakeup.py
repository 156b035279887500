"""Signals while an event loop waits."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from gapless.client.wakeup import woken_by_signals

NEVER_S = 1000.0


@pytest.fixture
def _no_switch_of_threads_unless_one_waits() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(NEVER_S)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_no_switch_of_threads_unless_one_waits")
def test_a_signal_that_another_thread_gets_ends_the_wait() -> None:
    go = threading.Event()

    def get_signal() -> None:
        go.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    async def wait() -> None:
        go.set()
        # The other thread goes on when this one lets go of the interpreter: in the loop's wait.
        await asyncio.Event().wait()

    thread = threading.Thread(target=get_signal)
    thread.start()
    with (
        pytest.raises(KeyboardInterrupt),
        asyncio.Runner() as runner,
        woken_by_signals(runner.get_loop()),
    ):
        runner.run(wait())
    thread.join()


def test_whoever_was_woken_before_is_woken_again_afterwards() -> None:
    with asyncio.Runner() as outer, woken_by_signals(outer.get_loop()):
        with asyncio.Runner() as inner, woken_by_signals(inner.get_loop()):
            pass
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(current)
        assert current != -1
    assert signal.set_wakeup_fd(-1) == -1
