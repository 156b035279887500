"""The gateways' conversation: who is connected, what they say, what they are told.

Owns the ROUTER socket that gateways connect to and the number of each connection. Checks here,
once, what a word must be for the core to take it. Knows nothing of steps. Called by `loop`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import zmq

from gapless.protos import rendezvous
from gapless.protos.messages import (
    Beat,
    GatewayGoodbye,
    GatewayHello,
    GatewayWord,
    ModelFacts,
    SchedulerUpdate,
    Submit,
    Vocabulary,
)
from gapless.protos.sampling import ALLOWED_TOKENS_MAX, BIAS_ENTRIES_MAX
from gapless.scheduler.config import GatewayIndex
from gapless.scheduler.routers import PeerId, Router

log = logging.getLogger(__name__)

QUEUED_UPDATES_MAX: Final = 20_000
"""Messages that may wait for one gateway before it is taken as gone: minutes of steps. An update
holds at most some tokens and events a running sequence, so the memory behind it is bounded too."""
BEAT_INTERVAL_S: Final = 1.0
HANDLE_MAX: Final = 2**62
TOKEN_ID_MAX: Final = 2**31 - 1


@dataclasses.dataclass(slots=True)
class _Gateway:
    peer: PeerId
    last_sent_s: float
    hello: GatewayHello | None = None


class Gateways:
    """All connected gateways, by index."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run_folder: Path,
        queued_max: int = QUEUED_UPDATES_MAX,
    ) -> None:
        """Binds the socket; `queued_max` messages may wait for a gateway."""
        self._router = Router(context, rendezvous.gateways_endpoint(run_folder), queued_max)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(GatewayWord)
        self._gateways: dict[GatewayIndex, _Gateway] = {}
        self._indices: dict[PeerId, GatewayIndex] = {}
        self._next_index = 0

    @property
    def sources(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """What to poll."""
        return self._router.sources

    def receive(self, now: float, count_max: int) -> Iterator[tuple[GatewayIndex, GatewayWord]]:
        """Words that are there already, at most `count_max`; what is no word is dropped."""
        for peer, data in self._router.receive(count_max):
            try:
                word = self._decoder.decode(data)
            except (msgspec.MsgspecError, RecursionError) as error:
                index = self._index(now, peer)
                log.error("gateway %d: dropped %d bytes: %s", index, len(data), error)
                continue
            if isinstance(word, GatewayGoodbye) and peer not in self._indices:
                continue  # the end of its connection was noticed before this last word was read
            index = self._index(now, peer)
            if isinstance(word, GatewayHello):
                self._gateways[index].hello = word
            yield index, word

    def greeted(self) -> list[tuple[GatewayIndex, GatewayHello]]:
        """Every connected gateway that has greeted."""
        return [(index, each.hello) for index, each in self._gateways.items() if each.hello]

    def send(self, now: float, gateway: GatewayIndex, word: SchedulerUpdate) -> None:
        """Sends, without waiting; a gateway that cannot be reached is among the next `departed`."""
        self._send(now, gateway, self._encoder.encode(word))

    def beat(self, now: float) -> None:
        """Says something to each gateway that has heard nothing for a while."""
        data = self._encoder.encode(Beat())
        for index, each in list(self._gateways.items()):
            if now - each.last_sent_s >= BEAT_INTERVAL_S:
                self._send(now, index, data)

    @property
    def next_beat(self) -> float | None:
        """When `beat` has something to do at the earliest."""
        last = min((each.last_sent_s for each in self._gateways.values()), default=None)
        return None if last is None else last + BEAT_INTERVAL_S

    def departed(self) -> list[GatewayIndex]:
        """Gateways that are gone since the last call; their indices never come back."""
        return [
            index for peer in self._router.departed() if (index := self._drop(peer)) is not None
        ]

    def leave(self, gateway: GatewayIndex) -> None:
        """Forgets a gateway that said goodbye."""
        if (each := self._gateways.pop(gateway, None)) is not None:
            del self._indices[each.peer]

    def close(self, linger_ms: int) -> None:
        self._router.close(linger_ms)

    def _index(self, now: float, peer: PeerId) -> GatewayIndex:
        index = self._indices.get(peer)
        if index is None:
            index = GatewayIndex(self._next_index)
            self._next_index += 1
            self._indices[peer] = index
            self._gateways[index] = _Gateway(peer, last_sent_s=now)
        return index

    def _send(self, now: float, gateway: GatewayIndex, data: bytes) -> None:
        each = self._gateways.get(gateway)
        if each is not None and self._router.send(each.peer, data):
            each.last_sent_s = now

    def _drop(self, peer: PeerId) -> GatewayIndex | None:
        index = self._indices.pop(peer, None)
        if index is not None:
            del self._gateways[index]
        return index


def hello_mistake(hello: GatewayHello, facts: ModelFacts) -> str | None:
    """Why a gateway cannot serve this executor's model; None if it can."""
    if hello.revision != facts.revision:
        return f"it has model {hello.revision}, the executor has {facts.revision}"
    return _vocabulary_mistake(hello.vocabulary, facts.vocab_size)


def submit_mistake(word: Submit, facts: ModelFacts) -> str | None:
    """What no gateway may send; None if the core can take the request."""
    if not 0 <= word.handle < HANDLE_MAX:
        return f"handle {word.handle}"
    if word.candidate_count != 1 or any(word.prior):
        return "more than one candidate, or prior tokens"
    if not word.prompt or len(word.prompt) % 4:
        return f"a prompt of {len(word.prompt)} bytes"
    stopping, sampling = word.stopping, word.sampling
    if not 1 <= stopping.max_new_tokens <= TOKEN_ID_MAX or stopping.min_new_tokens < 0:
        return f"{stopping.min_new_tokens} to {stopping.max_new_tokens} new tokens"
    if not all(stopping.stop_strings):
        return "an empty stop string"
    if not len(sampling.bias_tokens) == len(sampling.bias_values) <= BIAS_ENTRIES_MAX:
        return f"{len(sampling.bias_tokens)} biased tokens"
    if len(sampling.allowed_tokens) > ALLOWED_TOKENS_MAX:
        return f"{len(sampling.allowed_tokens)} allowed tokens"
    if not (0 <= sampling.seed < 2**64 and 0 <= sampling.top_k <= TOKEN_ID_MAX):
        return f"seed {sampling.seed}, top_k {sampling.top_k}"
    return _times_mistake(word) or _tokens_mistake(word, facts.vocab_size)


def _times_mistake(word: Submit) -> str | None:
    times = (word.received_s, word.queue_timeout_s, word.deadline_s, word.time_limit_s)
    if not all(time_s is None or math.isfinite(time_s) for time_s in times):
        return f"times {times}"
    if not -(2**31) <= word.priority < 2**31:
        return f"priority {word.priority}"
    return None


def _tokens_mistake(word: Submit, vocab_size: int) -> str | None:
    prompt = np.frombuffer(word.prompt, dtype="<i4")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        return f"prompt tokens {prompt.min()} to {prompt.max()}, the vocabulary has {vocab_size}"
    lists: Iterable[tuple[int, ...]] = (
        word.stopping.stop_tokens,
        word.sampling.bias_tokens,
        word.sampling.allowed_tokens,
    )
    for tokens in lists:
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            return f"tokens {min(tokens)} to {max(tokens)}, the vocabulary has {vocab_size}"
    return None


def _vocabulary_mistake(vocabulary: Vocabulary, vocab_size: int) -> str | None:
    if len(vocabulary.ends) != 4 * vocab_size or len(vocabulary.special) != vocab_size:
        return f"its vocabulary has {len(vocabulary.special)} tokens, the model {vocab_size}"
    ends = np.frombuffer(vocabulary.ends, dtype="<u4")
    if (ends[1:] < ends[:-1]).any() or ends[-1] != len(vocabulary.data):
        return "its vocabulary is not in order"
    return None
