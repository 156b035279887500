"""A gateway without clients: greets, submits, and keeps what comes back.

Owns the socket. Does next to nothing a step, so that it does not disturb what is measured: tokens
are put in order when all have come. Called by `measure`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from gapless.bench.server import Process, ServerError
from gapless.bench.sizes import Model
from gapless.bench.work import Request, Tokens
from gapless.protos import rendezvous
from gapless.protos.messages import (
    Admitted,
    Failed,
    Finished,
    FinishReason,
    GatewayGoodbye,
    GatewayHello,
    GatewayWord,
    Handle,
    PrefillStarted,
    SchedulerUpdate,
    ServerState,
    StateChanged,
    Stopping,
    Submit,
    Update,
    Vocabulary,
    Welcome,
)
from gapless.protos.sampling import Sampling

SILENCE_MAX_MS: Final = 30_000
"""A scheduler says something each second."""
PROGRESS_INTERVAL_S: Final = 10.0
GREEDY: Final = Sampling(temperature=0.0)

Receipts = npt.NDArray[np.int64]
"""Updates as they came, ``[n, 3]``: when one had arrived, when it was kept (both CLOCK_MONOTONIC in
nanoseconds), and how many tokens it brought."""


class Outcome:
    """What came back for the requests of one run."""

    def __init__(self) -> None:
        self.admitted_count = 0
        self.started_count = 0
        self.finished: list[Finished] = []
        self.ended_ns = 0
        """When the last `Finished` had been read."""
        self._handles: list[bytes] = []
        self._tokens: list[bytes] = []
        self._receipts: list[tuple[int, int, int]] = []

    @property
    def token_count(self) -> int:
        return sum(map(len, self._tokens)) // 4

    def take(self, update: Update, arrived_ns: int) -> None:
        """Keeps an update that was there at `arrived_ns`.

        Raises:
            ServerError: a request failed.
        """
        self._handles.append(update.handles)
        self._tokens.append(update.tokens)
        for event in update.events:
            match event:
                case Admitted():
                    self.admitted_count += 1
                case PrefillStarted():
                    self.started_count += 1
                case Finished():
                    self.finished.append(event)
                    self.ended_ns = time.monotonic_ns()
                case Failed(reason=reason, message=message):
                    raise ServerError(f"a request failed: {reason.name}: {message}")
        self._receipts.append((arrived_ns, time.monotonic_ns(), len(update.tokens) // 4))

    def receipts(self) -> Receipts:
        """Of all updates, in order."""
        return np.array(self._receipts, np.int64).reshape(-1, 3)

    def tokens_of(self, handles: Sequence[Handle]) -> list[Tokens]:
        """All tokens of each handle, in order."""
        owners = np.frombuffer(b"".join(self._handles), "<i8")
        tokens = np.frombuffer(b"".join(self._tokens), "<i4")
        order = np.argsort(owners, kind="stable")
        owners, tokens = owners[order], tokens[order]
        first = np.searchsorted(owners, handles, side="left")
        last = np.searchsorted(owners, handles, side="right")
        return [tokens[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]


class Link:
    """One connection to a scheduler."""

    def __init__(self, run_folder: Path, processes: Sequence[Process]) -> None:
        """Connects. The end of one of the `processes` ends every wait."""
        self._processes = processes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.connect(rendezvous.gateways_endpoint(run_folder))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        for process in processes:
            self._poller.register(process.end, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(SchedulerUpdate)
        self._next_handle = 0
        self._arrived_ns = 0
        """When the last word that was heard was there."""

    def greet(self, model: Model) -> Welcome:
        """Says which model we speak for, with tokens that have no text; waits for the answer."""
        count = model.vocab_size
        vocabulary = Vocabulary(b"", np.zeros(count, "<u4").tobytes(), bytes(count))
        self._say(GatewayHello(model.revision, vocabulary))
        while True:
            match self._hear():
                case Welcome() as welcome:
                    return welcome
                case StateChanged(state=ServerState.FAILED):
                    raise self._processes[0].error("refused us")

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        """Sends requests; their handles."""
        handles = [Handle(self._next_handle + k) for k in range(len(requests))]
        self._next_handle += len(requests)
        for handle, request in zip(handles, requests, strict=True):
            self._say(
                Submit(
                    handle=handle,
                    request_id=f"bench-{handle}",
                    tenant="",
                    prompt=request.prompt.astype("<i4").tobytes(),
                    sampling=GREEDY,
                    stopping=Stopping(request.new_tokens),
                    received_s=time.monotonic(),
                )
            )
        return handles

    def collect(self, outcome: Outcome, until: Callable[[], bool]) -> None:
        """Takes updates until a condition holds.

        Raises:
            ServerError: a request failed, or a process is gone.
        """
        next_line_s = time.monotonic() + PROGRESS_INTERVAL_S
        while not until():
            word = self._hear()
            if isinstance(word, Update):
                outcome.take(word, self._arrived_ns)
            if time.monotonic() >= next_line_s:
                next_line_s += PROGRESS_INTERVAL_S
                print(f"  ... {outcome.token_count} tokens", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Says goodbye."""
        if self._processes[0].popen.poll() is None:
            self._say(GatewayGoodbye())
        self._context.destroy(linger=1000)

    def _say(self, word: GatewayWord) -> None:
        self._socket.send(msgspec.msgpack.encode(word))

    def _hear(self) -> SchedulerUpdate:
        ready = dict(self._poller.poll(SILENCE_MAX_MS))
        if self._socket in ready:
            self._arrived_ns = time.monotonic_ns()
            word: SchedulerUpdate = self._decoder.decode(self._socket.recv())
            return word
        for process in self._processes:
            if process.end in ready:
                raise process.error("ended by itself")
        raise self._processes[0].error(f"said nothing for {SILENCE_MAX_MS} ms")


def check_complete(requests: Sequence[Request], tokens: Sequence[Tokens], outcome: Outcome) -> None:
    """Asserts that each request got what it asked for.

    Raises:
        ServerError: one did not.
    """
    for k, (request, got) in enumerate(zip(requests, tokens, strict=True)):
        if len(got) != request.new_tokens:
            raise ServerError(f"request {k} got {len(got)} of {request.new_tokens} tokens")
    for event in outcome.finished:
        if event.reason is not FinishReason.MAX_NEW_TOKENS:
            raise ServerError(f"a request ended with {event.reason.name}")
