"""Who waits, in order, and whose time is up: heaps whose members may leave from the middle.

Both queues stay cheap at any length: to join or leave costs O(log n), to look at the first O(1)
amortised. Leaving marks; the heap drops marked entries when they surface, or all at once when
they are the majority.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from gapless.scheduler.request import Sequence

Key = TypeVar("Key", tuple[int, int], float)
Item = TypeVar("Item")

STALE_ENTRIES_MIN = 64
"""Marked entries that are never worth a rebuild."""


class LazyHeap(Generic[Key, Item]):
    """Items by key; each has a ticket, a number of its own, by which it can leave."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int]] = []
        self._items: dict[int, Item] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        """In order of joining."""
        return iter(self._items.values())

    def push(self, key: Key, ticket: int, item: Item) -> None:
        assert ticket not in self._items, ticket
        self._items[ticket] = item
        heapq.heappush(self._entries, (key, ticket))

    def first(self) -> tuple[Key, int, Item] | None:
        """The item with the smallest key, and its ticket; it stays."""
        entries, items = self._entries, self._items
        while entries and entries[0][1] not in items:
            heapq.heappop(entries)
        if not entries:
            return None
        key, ticket = entries[0]
        return key, ticket, items[ticket]

    def discard(self, ticket: int) -> None:
        """Removes an item; no effect if it has left already."""
        if self._items.pop(ticket, None) is None:
            return
        stale_count = len(self._entries) - len(self._items)
        if stale_count > max(STALE_ENTRIES_MIN, len(self._items)):
            # A set, because an item that left and joined again may stand here twice.
            self._entries = list({entry for entry in self._entries if entry[1] in self._items})
            heapq.heapify(self._entries)


class WaitingQueue:
    """Sequences without a seat, highest priority and then earliest arrival first."""

    def __init__(self) -> None:
        self._heap: LazyHeap[tuple[int, int], Sequence] = LazyHeap()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of joining, so the one that waits longest comes first."""
        return iter(self._heap)

    @property
    def tokens(self) -> int:
        """Known tokens of all that wait."""
        return self._tokens

    def push(self, sequence: Sequence) -> None:
        self._heap.push(sequence.order, sequence.arrival, sequence)
        self._tokens += len(sequence.tokens)

    def first(self) -> Sequence | None:
        found = self._heap.first()
        return None if found is None else found[2]

    def remove(self, sequence: Sequence) -> None:
        self._heap.discard(sequence.arrival)
        self._tokens -= len(sequence.tokens)


class Clock(enum.Enum):
    """Why a sequence's time may be up."""

    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue timeout"
    TIME_LIMIT = "time limit"


class Timers:
    """All clocks that run, the next one first."""

    def __init__(self) -> None:
        self._heap: LazyHeap[float, tuple[Sequence, Clock]] = LazyHeap()
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._heap)

    def start(self, when: float, sequence: Sequence, clock: Clock) -> None:
        self._ticket += 1
        self._heap.push(when, self._ticket, (sequence, clock))
        sequence.timers.append(self._ticket)

    def stop_all(self, sequence: Sequence) -> None:
        for ticket in sequence.timers:
            self._heap.discard(ticket)
        sequence.timers.clear()

    def next_due(self) -> float | None:
        found = self._heap.first()
        return None if found is None else found[0]

    def pop_due(self, now: float) -> tuple[Sequence, Clock] | None:
        """Takes the first clock that has run out by `now`; None if there is none."""
        found = self._heap.first()
        if found is None or found[0] > now:
            return None
        _, ticket, (sequence, clock) = found
        self._heap.discard(ticket)
        sequence.timers.remove(ticket)
        return sequence, clock
