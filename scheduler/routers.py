"""One bound ZeroMQ ROUTER socket that also knows when a peer is gone.

Owns a socket, its monitor, and which connection each peer came by. Knows nothing of words: bytes
in, bytes out. Called by `gateways` and `executors`.

A peer is gone when its connection closed (the socket's monitor tells, at once), when a send finds
no route (ROUTER_MANDATORY), or when it has not read `queued_max` messages: a send never blocks, so
what waits for a peer is bounded, and a peer that does not read is as good as none. If such a one
comes to again, it is neither heard nor spoken to until its connection closes: it has missed words,
and must find by the silence that it was taken as gone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NewType

import zmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

PeerId = NewType("PeerId", bytes)
"""ZeroMQ's name for a connection."""

WORD_BYTES_MAX: Final = 64 << 20
"""Longest message accepted; the longest that is meant to be sent is a vocabulary of some MiB."""


class Router:
    """A ROUTER socket bound to one endpoint."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, queued_max: int):
        """Binds.

        Args:
            context: of the process.
            endpoint: a path, see `rendezvous`.
            queued_max: most messages that wait for one peer, beyond what the kernel holds.

        Raises:
            zmq.ZMQError: the endpoint cannot be bound.
        """
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.SNDHWM, queued_max)
        self._socket.set(zmq.MAXMSGSIZE, WORD_BYTES_MAX)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(endpoint)
        self._path = Path(endpoint.removeprefix("ipc://"))
        self._descriptors: dict[PeerId, int] = {}
        self._peers: dict[int, PeerId] = {}
        self._gone: list[PeerId] = []
        self._cut: set[PeerId] = set()
        """Peers that did not read, as long as their connections stand."""

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What to poll: readable when a message came or a peer left."""
        return self._socket, self._monitor

    def receive(self, count_max: int) -> Iterable[tuple[PeerId, bytes]]:
        """Messages that are there already, at most `count_max`, each with its sender."""
        for _ in range(count_max):
            if not _is_readable(self._socket):
                return
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if len(parts) != 2:
                log.error("dropped a message of %d parts", len(parts) - 1)
                continue
            peer = PeerId(parts[0].bytes)
            if peer in self._cut:
                continue
            if peer not in self._descriptors:
                self._remember(peer, int(parts[1].get(zmq.SRCFD)))
            yield peer, parts[1].bytes

    def send(self, peer: PeerId, data: bytes) -> bool:
        """Sends, without waiting. False: the peer is gone, and `departed` names it."""
        if peer not in self._descriptors or peer in self._cut:
            return False  # ZeroMQ may still have a route to a connection that has just closed
        try:
            self._socket.send_multipart((peer, data), zmq.NOBLOCK)
        except zmq.Again:
            log.error("a peer does not read its messages: taken as gone")
            self._cut.add(peer)
            self._gone.append(peer)
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        else:
            return True
        self._forget(peer)
        return False

    def departed(self) -> list[PeerId]:
        """Peers that left since the last call, each once."""
        self._read_monitor()
        gone, self._gone = self._gone, []
        return gone

    def close(self, linger_ms: int) -> None:
        """Unbinds; messages not yet on their way get `linger_ms` (spent in the context's term)."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)
        self._path.unlink(missing_ok=True)

    def _remember(self, peer: PeerId, descriptor: int) -> None:
        # The descriptor may have been another's: that one's end stands in the monitor already,
        # because ZeroMQ's one I/O thread closed it before it accepted this one.
        self._read_monitor()
        self._descriptors[peer] = descriptor
        self._peers[descriptor] = peer

    def _forget(self, peer: PeerId) -> None:
        descriptor = self._descriptors.pop(peer, None)
        if descriptor is not None:
            if self._peers.get(descriptor) == peer:
                del self._peers[descriptor]
            if peer in self._cut:
                self._cut.remove(peer)  # named when that happened
            else:
                self._gone.append(peer)

    def _read_monitor(self) -> None:
        while _is_readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            peer = self._peers.get(event["value"])
            if peer is not None:
                self._forget(peer)


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    """Asked before each read: cheaper than the exception of a read that finds nothing."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)
