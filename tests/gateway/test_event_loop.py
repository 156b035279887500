"""The event loop's reader of wake-ups: none is lost, and many are one."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gapless.gateway.event_loop import EventLoop


@pytest.mark.parametrize(("as_socket", "calls_expected"), [(True, 2), (False, 6)])
def test_wakeups_written_meanwhile_are_one(as_socket: bool, calls_expected: int) -> None:
    """As grpc.aio's reader: one byte a call. The first call writes another one."""

    async def scenario() -> int:
        loop = asyncio.get_running_loop()
        receiver, sender = socket.socketpair()
        calls = 0

        def read(name: str) -> None:
            nonlocal calls
            calls += 1
            assert name == "name"
            assert receiver.recv(1) == b"1"
            if calls == 1:
                sender.send(b"1")

        with receiver, sender:
            receiver.setblocking(False)
            sender.send(b"1" * 5)
            loop.add_reader(receiver if as_socket else receiver.fileno(), read, "name")
            for _ in range(20):
                await asyncio.sleep(0)
            assert loop.remove_reader(receiver)
        return calls

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        assert runner.run(scenario()) == calls_expected
