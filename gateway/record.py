"""What is written down of one Generate call: one structured line in the log, at its end.

Never prompt or output text. Must not know: how a call is served. Filled by `generate`.
"""

from __future__ import annotations

import json
import logging
import time

_LOG = logging.getLogger("gapless.gateway.requests")


class Record:
    """The story of a call, as far as it came."""

    __slots__ = (
        "completion_tokens",
        "delta_count",
        "finish",
        "first_delta_s",
        "labels",
        "outcome",
        "prompt_tokens",
        "queue_s",
        "received_s",
        "received_wall_ns",
        "request_id",
        "submitted_s",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.received_s = time.monotonic()
        self.received_wall_ns = time.time_ns()
        self.submitted_s = self.received_s
        self.outcome = "INTERNAL"
        """OK, CANCELLED, or the reason of the failure; INTERNAL if none of them was set."""
        self.finish: str | None = None
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.delta_count = 0
        self.queue_s: float | None = None
        self.first_delta_s: float | None = None
        """From the arrival to the first delta handed to the transport."""
        self.labels: dict[str, str] = {}

    def delta_sent(self, token_count: int) -> None:
        """A delta was handed to the transport."""
        if self.first_delta_s is None:
            self.first_delta_s = time.monotonic() - self.received_s
        self.delta_count += 1
        self.completion_tokens += token_count

    def log(self, model: str) -> None:
        """Writes the line."""
        if not _LOG.isEnabledFor(logging.INFO):
            return
        line: dict[str, object] = {
            "request_id": self.request_id[:64],
            "model": model,
            "outcome": self.outcome,
            "finish": self.finish,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "deltas": self.delta_count,
            "queue_ms": _ms(self.queue_s),
            "first_delta_ms": _ms(self.first_delta_s),
            "total_ms": _ms(time.monotonic() - self.received_s),
        }
        if self.labels:
            line["labels"] = self.labels
        _LOG.info("%s", json.dumps(line))


def _ms(duration_s: float | None) -> float | None:
    return None if duration_s is None else round(duration_s * 1000, 1)
