"""Every live sequence, by the names its gateway and its client have for it.

Owns the two maps and nothing of the sequences. An entry stands from admission to the terminal
event; then handle and request id are free again.
"""

from __future__ import annotations

from collections.abc import Iterator

from gapless.protos.messages import Handle
from gapless.scheduler.config import GatewayIndex
from gapless.scheduler.request import Phase, Sequence


class Registry:
    """Live sequences by (gateway, handle) and by (tenant, request id)."""

    def __init__(self) -> None:
        self._by_gateway: dict[GatewayIndex, dict[Handle, Sequence]] = {}
        self._by_request_id: dict[tuple[str, str], Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_request_id)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of admission."""
        return iter(self._by_request_id.values())

    def add(self, sequence: Sequence) -> None:
        handles = self._by_gateway.setdefault(sequence.gateway, {})
        assert sequence.handle not in handles, f"handle {sequence.handle} used twice"
        name = (sequence.tenant, sequence.request_id)
        assert name not in self._by_request_id, "a request id in use is refused before"
        handles[sequence.handle] = sequence
        self._by_request_id[name] = sequence

    def remove(self, sequence: Sequence) -> None:
        handles = self._by_gateway[sequence.gateway]
        del handles[sequence.handle]
        if not handles:
            del self._by_gateway[sequence.gateway]
        del self._by_request_id[sequence.tenant, sequence.request_id]

    def by_handle(self, gateway: GatewayIndex, handle: Handle) -> Sequence | None:
        return self._by_gateway.get(gateway, {}).get(handle)

    def by_request_id(self, tenant: str, request_id: str) -> Sequence | None:
        return self._by_request_id.get((tenant, request_id))

    def of_gateway(self, gateway: GatewayIndex) -> list[Sequence]:
        return list(self._by_gateway.get(gateway, {}).values())

    def check(self) -> None:
        """Asserts that both maps hold the same, live sequences."""
        count = sum(map(len, self._by_gateway.values()))
        assert count == len(self._by_request_id), (count, len(self._by_request_id))
        assert all(self._by_gateway.values()), "an empty map of a gateway"
        for sequence in self:
            assert sequence.phase is not Phase.ENDED, f"{sequence.request_id} has ended"
