"""The requests that are live, and one log line for each at its end.

Owns what a log line needs beyond the terminal event, and which handles each gateway has live. It
never holds a prompt or a token. The shell writes to it what goes in and out of the core; it is
also what the shell trusts when the core itself is broken, to tell everyone that it is over.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable

from gapless.protos.messages import Failed, Finished, Handle, Submit
from gapless.scheduler.config import GatewayIndex

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What is remembered of a live request."""

    request_id: str
    tenant: str
    prompt_tokens: int
    submitted_s: float
    """When the scheduler received it."""


class Journal:
    """Live requests by gateway and handle."""

    def __init__(self) -> None:
        self._live: dict[GatewayIndex, dict[Handle, Entry]] = {}

    @property
    def live_count(self) -> int:
        return sum(map(len, self._live.values()))

    def is_live(self, gateway: GatewayIndex, handle: Handle) -> bool:
        return handle in self._live.get(gateway, ())

    def live(self) -> list[tuple[GatewayIndex, tuple[Handle, ...]]]:
        """The live handles of each gateway that has some."""
        return [(gateway, tuple(entries)) for gateway, entries in self._live.items() if entries]

    def begin(self, now: float, gateway: GatewayIndex, word: Submit) -> None:
        """A request goes into the core."""
        entries = self._live.setdefault(gateway, {})
        assert word.handle not in entries, f"handle {word.handle} is live already"
        entries[word.handle] = Entry(word.request_id, word.tenant, len(word.prompt) // 4, now)

    def end(self, now: float, gateway: GatewayIndex, events: Iterable[object]) -> None:
        """Events go out: those that are terminal end their requests."""
        for event in events:
            if isinstance(event, Finished | Failed):
                entries = self._live.get(gateway, {})
                assert event.handle in entries, f"{event.handle} ends, but is not live: {event}"
                _write_line(now, entries.pop(event.handle), event)

    def forget(self, gateway: GatewayIndex) -> None:
        """A gateway is gone, and its requests with it."""
        for entry in self._live.pop(gateway, {}).values():
            log.info("end %s", json.dumps({**_described(entry), "reason": "GATEWAY_GONE"}))


def _described(entry: Entry) -> dict[str, str | int | float]:
    described: dict[str, str | int | float] = {"id": entry.request_id}
    if entry.tenant:
        described["tenant"] = entry.tenant
    described["prompt_tokens"] = entry.prompt_tokens
    return described


def _write_line(now: float, entry: Entry, event: Finished | Failed) -> None:
    line = {**_described(entry), "reason": event.reason.name}
    line["total_s"] = round(now - entry.submitted_s, 6)
    if isinstance(event, Finished):
        line["completion_tokens"] = event.completion_tokens
        line["cached_prompt_tokens"] = event.cached_prompt_tokens
        line["preemptions"] = event.preemption_count
        for stage in ("queue_s", "prefill_s", "decode_s"):
            line[stage] = round(getattr(event.timing, stage), 6)
    log.info("end %s", json.dumps(line))
