"""One sequence's life: the states, the moves between them, and what is known of it.

Two rules: a sequence is in exactly one `Phase`, and only the moves of `TRANSITIONS` exist; a
missing key *is* the illegal move. This file knows nothing of seats' arrays, blocks or steps; the
core and its placement move the sequences. The life cycle, drawn by `diagram` from the table::

    QUEUED     --SEAT-->   RUNNING
    QUEUED     --END-->    ENDED
    RUNNING    --REWIND--> RUNNING
    RUNNING    --YIELD-->  YIELDING
    RUNNING    --END-->    ENDED
    YIELDING   --SETTLE--> PREEMPTED
    YIELDING   --END-->    ENDED
    PREEMPTED  --SEAT-->   RUNNING
    PREEMPTED  --END-->    ENDED
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from gapless.protos.messages import FinishReason, Handle, Stopping, Timing
from gapless.protos.sampling import Sampling
from gapless.protos.seats import Int32s
from gapless.protos.stops import StopMatcher
from gapless.scheduler.config import GatewayIndex


class Phase(enum.Enum):
    """Where a sequence stands."""

    QUEUED = "queued"
    """Admitted; waits for its first seat."""
    RUNNING = "running"
    """Has a seat and blocks, and gets rows."""
    YIELDING = "yielding"
    """Preempted with rows in flight: keeps seat and blocks until their results have arrived."""
    PREEMPTED = "preempted"
    """Waits for a seat again; all its tokens are its prompt now."""
    ENDED = "ended"
    """Its terminal event is out. Its seat and blocks may still be fenced."""


class Move(enum.Enum):
    """What happens to a sequence."""

    SEAT = "seat"
    """It gets a seat and blocks."""
    REWIND = "rewind"
    """The executor was lost: back to the last acknowledged token."""
    YIELD = "yield"
    """It is preempted."""
    SETTLE = "settle"
    """The last of its rows in flight has its result, or never will."""
    END = "end"
    """Its one terminal event."""


TRANSITIONS: dict[Phase, dict[Move, Phase]] = {
    Phase.QUEUED: {Move.SEAT: Phase.RUNNING, Move.END: Phase.ENDED},
    Phase.RUNNING: {
        Move.REWIND: Phase.RUNNING,
        Move.YIELD: Phase.YIELDING,
        Move.END: Phase.ENDED,
    },
    Phase.YIELDING: {Move.SETTLE: Phase.PREEMPTED, Move.END: Phase.ENDED},
    Phase.PREEMPTED: {Move.SEAT: Phase.RUNNING, Move.END: Phase.ENDED},
    Phase.ENDED: {},
}

SEATED = frozenset({Phase.RUNNING, Phase.YIELDING})
"""Phases in which a sequence holds a seat."""
WAITING = frozenset({Phase.QUEUED, Phase.PREEMPTED})
"""Phases in which a sequence stands in the queue."""

NO_TOKENS: Int32s = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


def after(phase: Phase, move: Move) -> Phase:
    """The phase after `move`; an illegal move is our mistake."""
    following = TRANSITIONS[phase].get(move)
    assert following is not None, f"{move.name} of a sequence that is {phase.name}"
    return following


def diagram() -> str:
    """The life cycle as text, one move a line."""
    return "\n".join(
        f"{phase.name:<10} {f'--{move.name}-->':<12}{following.name}"
        for phase, moves in TRANSITIONS.items()
        for move, following in moves.items()
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Why a sequence's last token ended it."""

    reason: FinishReason
    stop_token: int | None = None
    stop_string_index: int | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a request, and (as long as a request has one) the request itself.

    While it holds a seat, its tokens and lengths are in the seat's columns (`seats.py`); while it
    waits, they are here.
    """

    gateway: GatewayIndex
    handle: Handle
    request_id: str
    tenant: str
    priority: int
    arrival: int
    """Which in order of admission; kept when it is preempted."""
    sampling: Sampling
    stopping: Stopping
    prompt_length: int
    limit_length: int
    """Prompt plus output at which it ends, in tokens."""
    matcher: StopMatcher | None
    """Its place in the automaton of its stop strings; has been fed every known new token."""
    tokens: Int32s
    """All known tokens, prompt first; empty while it holds a seat."""
    admitted_s: float
    queued_s: float
    """When it entered the queue, the last time."""
    phase: Phase = Phase.QUEUED
    seat: int | None = None
    started_s: float | None = None
    """First prefill row."""
    first_token_s: float | None = None
    device_from_ns: int = 0
    """What the device had worked in all when it was admitted; see `statistics.Work`."""
    device_s: float = 0.0
    """What the device worked from then to its first token."""
    preemption_count: int = 0
    timers: list[int] = dataclasses.field(default_factory=list)
    """Tickets of its running clocks."""

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: higher priority, then earlier arrival."""
        return (-self.priority, self.arrival)

    @property
    def seat_held(self) -> int:
        """Its seat; asserts that there is one."""
        assert self.seat is not None, f"a sequence that is {self.phase.name} has no seat"
        return self.seat

    @property
    def min_length(self) -> int:
        """Known tokens from which on stop tokens and stop strings count."""
        return self.prompt_length + self.stopping.min_new_tokens

    @property
    def length_reason(self) -> FinishReason:
        """The finish reason of reaching `limit_length`."""
        if self.stopping.max_new_tokens_is_room:
            return FinishReason.CONTEXT_LENGTH
        return FinishReason.MAX_NEW_TOKENS

    def move(self, move: Move) -> None:
        """Takes a legal move."""
        self.phase = after(self.phase, move)

    def timing(self, now: float) -> Timing:
        """Durations so far; a stage that goes on counts until `now`."""
        started = now if self.started_s is None else self.started_s
        first = now if self.first_token_s is None else self.first_token_s
        return Timing(started - self.admitted_s, first - started, now - first, self.device_s)


def stop_of(sequence: Sequence, token: int, known_length: int, data: bytes) -> Stop | None:
    """Whether `token`, with which the sequence has `known_length` tokens, ends it.

    `data` is the token's text; it is looked at only if there are stop strings, and must then be
    fed for every token once, in order. A stop token wins over a stop string, both over the length.
    """
    counts = known_length >= sequence.min_length
    if counts and token in sequence.stopping.stop_tokens:
        return Stop(FinishReason.STOP_TOKEN, stop_token=token)
    if sequence.matcher is not None:
        match = sequence.matcher.feed(data, ignore=not counts)
        if match is not None:
            return Stop(FinishReason.STOP_STRING, stop_string_index=match.index)
    if known_length >= sequence.limit_length:
        return Stop(sequence.length_reason)
    return None
