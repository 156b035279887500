"""News for the gateways, collected until the shell takes them: one update a gateway.

Owns what is said and not yet taken. Knows nothing of why. Tokens arrive as columns and leave as
bytes; no object is made for a token.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from gapless.protos.messages import Event, Update
from gapless.protos.seats import Int32s
from gapless.scheduler.config import GatewayIndex
from gapless.scheduler.seats import Int64s, some


@dataclasses.dataclass(slots=True)
class _News:
    handles: list[bytes] = dataclasses.field(default_factory=list)
    tokens: list[bytes] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)

    def update(self) -> Update:
        return Update(b"".join(self.handles), b"".join(self.tokens), tuple(self.events))


class Outbox:
    """What each gateway has not been told yet."""

    def __init__(self) -> None:
        self._news: dict[GatewayIndex, _News] = {}

    def add_tokens(self, gateways: Int64s, handles: Int64s, tokens: Int32s) -> None:
        """One token for each of ``[n]`` sequences."""
        if not len(gateways):
            return
        borders = [0, len(gateways)]
        if some(gateways != gateways[0]):
            # Stable, so that a sequence's tokens stay in order.
            order = np.argsort(gateways, kind="stable")
            gateways, handles, tokens = gateways[order], handles[order], tokens[order]
            borders[1:1] = (np.flatnonzero(gateways[1:] != gateways[:-1]) + 1).tolist()
        for start, end in itertools.pairwise(borders):
            news = self._of(GatewayIndex(int(gateways[start])))
            news.handles.append(handles[start:end].tobytes())
            news.tokens.append(tokens[start:end].tobytes())

    def add_event(self, gateway: GatewayIndex, event: Event) -> None:
        self._of(gateway).events.append(event)

    def forget(self, gateway: GatewayIndex) -> None:
        """Drops what a gateway that is gone was to be told."""
        self._news.pop(gateway, None)

    def take(self) -> dict[GatewayIndex, Update]:
        """Everything, once."""
        news, self._news = self._news, {}
        return {gateway: each.update() for gateway, each in news.items()}

    def _of(self, gateway: GatewayIndex) -> _News:
        news = self._news.get(gateway)
        if news is None:
            news = self._news[gateway] = _News()
        return news
