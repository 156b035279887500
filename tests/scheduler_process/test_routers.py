"""A ROUTER that never waits for a peer, and knows when one is gone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gapless.scheduler.routers import PeerId, Router

Context = zmq.Context[zmq.Socket[bytes]]
PATIENCE_MS = 60_000
QUEUED_MAX = 5


class Wire:
    """A router and its peers; closes what it has made."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "socket"
        self.context: Context = zmq.Context()
        self.router = Router(self.context, f"ipc://{self.path}", QUEUED_MAX)
        self._peers: list[zmq.Socket[bytes]] = []

    def peer(self, **limits: int) -> tuple[zmq.Socket[bytes], PeerId]:
        """A new peer that has said one word."""
        peer = self.context.socket(zmq.DEALER)
        self._peers.append(peer)
        for name, value in limits.items():
            peer.set(getattr(zmq, name), value)
        peer.connect(f"ipc://{self.path}")
        peer.send(b"hello")
        ((peer_id, data),) = received(self.router, 1)
        assert data == b"hello"
        return peer, peer_id

    def close(self) -> None:
        for peer in self._peers:
            peer.close(0)
        self.router.close(0)
        self.context.term()


@pytest.fixture
def wire() -> Iterator[Wire]:
    with tempfile.TemporaryDirectory(prefix="gapless-") as folder:
        made = Wire(Path(folder))
        yield made
        made.close()


def received(router: Router, count: int) -> list[tuple[PeerId, bytes]]:
    """The next messages, as many as are expected."""
    messages: list[tuple[PeerId, bytes]] = []
    while len(messages) < count:
        assert router.sources[0].poll(PATIENCE_MS), "nothing came"
        messages += router.receive(100)
    return messages


def test_messages_go_to_and_from_the_peer_that_is_named(wire: Wire) -> None:
    router = wire.router
    first, first_id = wire.peer()
    second, second_id = wire.peer()
    assert router.send(second_id, b"two")
    assert router.send(first_id, b"one")
    assert (first.recv(), second.recv()) == (b"one", b"two")
    assert router.departed() == []


def test_no_more_than_asked_is_taken(wire: Wire) -> None:
    router = wire.router
    peer, _ = wire.peer()
    for k in range(10):
        peer.send(b"%d" % k)
    taken: list[bytes] = []
    while len(taken) < 10:
        assert router.sources[0].poll(PATIENCE_MS)
        some = [data for _, data in router.receive(3)]
        assert len(some) <= 3
        taken += some
    assert taken == [b"%d" % k for k in range(10)]


def test_a_closed_connection_is_a_departure_without_any_send(wire: Wire) -> None:
    router = wire.router
    peer, peer_id = wire.peer()
    other, other_id = wire.peer()
    peer.close(0)
    assert router.sources[1].poll(PATIENCE_MS)
    assert router.departed() == [peer_id]
    assert router.departed() == []
    assert not router.send(peer_id, b"too late")
    assert router.departed() == [], "named once"
    assert router.send(other_id, b"still here")
    assert other.recv() == b"still here"


def test_a_peer_that_does_not_read_is_gone_and_never_waited_for(wire: Wire) -> None:
    router = wire.router
    slow, slow_id = wire.peer(RCVHWM=1, RCVBUF=4096)
    reading, reading_id = wire.peer()
    message = bytes(1 << 20)
    sent = 0
    while router.send(slow_id, message):
        sent += 1
        assert sent < 1000, "what waits for a peer has a limit"
    assert sent >= QUEUED_MAX
    assert router.departed() == [slow_id]
    assert router.send(reading_id, b"word")
    assert reading.recv() == b"word"
    # It comes to, but has missed words: by the silence it learns that it was given up.
    for _ in range(sent):
        assert len(slow.recv()) == len(message)
    slow.send(b"what was that?")
    assert router.sources[0].poll(PATIENCE_MS)
    assert list(router.receive(100)) == []
    assert not router.send(slow_id, b"word")
    slow.close(0)
    assert router.sources[1].poll(PATIENCE_MS)
    assert router.departed() == [], "named once"


def test_connections_that_come_and_go_are_told_apart(wire: Wire) -> None:
    """The kernel gives the same descriptor again; departures must name the right peer."""
    router = wire.router
    stays, stays_id = wire.peer()
    seen = {stays_id}
    for _ in range(30):
        peer, peer_id = wire.peer()
        assert peer_id not in seen
        seen.add(peer_id)
        peer.close(0)
        assert router.sources[1].poll(PATIENCE_MS)
        assert router.departed() == [peer_id]
    assert router.send(stays_id, b"word")
    assert stays.recv() == b"word"


def test_nothing_is_left_of_a_closed_router(wire: Wire) -> None:
    path = wire.path.with_name("another")
    router = Router(wire.context, f"ipc://{path}", QUEUED_MAX)
    assert path.exists()
    router.close(0)
    assert not path.exists()
