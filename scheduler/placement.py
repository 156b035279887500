"""Who has a seat and blocks: the moves between queue and seats, under the fence.

Owns the two fenced pools and the queue, and is the only one that moves a sequence between them.
Every move keeps the shared seat table in step by assignments. Whom to seat or preempt is decided
elsewhere (`policy.py`, `planner.py`); this file must not know why.
"""

from __future__ import annotations

import numpy as np

from gapless.protos.seats import ALLOWED_COUNT, Int32s
from gapless.scheduler.config import CoreConfig
from gapless.scheduler.fence import FencedPool
from gapless.scheduler.frames import apply_assignments
from gapless.scheduler.queues import WaitingQueue
from gapless.scheduler.request import WAITING, Move, Phase, Sequence
from gapless.scheduler.seats import Indices, Seats


class Placement:
    """Seats, blocks and the queue of one core."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._layout = config.seat_layout
        self.seats = Seats(config)
        self.free_seats = FencedPool(config.running_max)
        self.blocks = FencedPool(config.block_count - 1)
        self.waiting = WaitingQueue()
        self.yielding: list[Sequence] = []
        self.preemption_count = 0

    # ------------------------------------------------------------------ taking places

    def assignment_count(self, sequence: Sequence, block_count: int) -> int:
        """Assignments that seating it with `block_count` blocks takes, on the next free seat."""
        stale_count = int(self.seats.block_count[self.free_seats.peek()])
        sampling = sequence.sampling
        listed = 2 * len(sampling.bias_tokens) + len(sampling.allowed_tokens)
        return ALLOWED_COUNT + 1 + listed + max(block_count, stale_count)

    def seat(self, sequence: Sequence, block_count: int) -> Int32s:
        """Seats a waiting sequence with `block_count` blocks; the assignments, ``[n, 3]``.

        They write its sampling parameters and its whole block list, zeros where the seat's last
        holder had more blocks.
        """
        self.waiting.remove(sequence)
        seat = int(self.free_seats.take(1)[0])
        stale_count = int(self.seats.block_count[seat])
        self.seats.occupy(seat, sequence, self.blocks.take(block_count))
        sequence.move(Move.SEAT)
        return self._record(seat, max(block_count, stale_count))

    def extend(self, seats: Indices) -> Int32s:
        """Gives each of `seats` one more block; the assignments, ``[n, 3]``."""
        blocks = self.blocks.take(len(seats))
        assignments = np.empty((len(seats), 3), np.int32)
        assignments[:, 0] = seats
        assignments[:, 1] = self._layout.blocks_at + self.seats.append_blocks(seats, blocks)
        assignments[:, 2] = blocks
        return assignments

    def write_table(self, table: Int32s) -> None:
        """Writes every live seat's record into a zeroed table."""
        for sequence in self.seats.holders():
            seat = sequence.seat_held
            apply_assignments(table, self._record(seat, int(self.seats.block_count[seat])))

    def _record(self, seat: int, place_count: int) -> Int32s:
        """Assignments of a seat's sampling parameters and its first `place_count` places."""
        words, values = self._layout.sampling_words(self.seats.sequence(seat).sampling)
        blocks = np.zeros(place_count, np.int32)
        held = self.seats.blocks(seat)
        blocks[: len(held)] = held
        places = np.arange(place_count, dtype=np.int32) + self._layout.blocks_at
        record = np.empty((len(words) + place_count, 3), np.int32)
        record[:, 0] = seat
        record[:, 1] = np.concatenate((words, places))
        record[:, 2] = np.concatenate((values, blocks))
        return record

    # ------------------------------------------------------------------ giving them back

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Takes seat and blocks from a running sequence, at once or when its rows have results."""
        sequence.move(Move.YIELD)
        sequence.preemption_count += 1
        self.preemption_count += 1
        self.seats.runs[sequence.seat_held] = False
        self.yielding.append(sequence)
        self.settle(now)

    def settle(self, now: float) -> None:
        """Sends back to the queue who yields and has no row in flight any more."""
        if not self.yielding:
            return
        acknowledged_step = self.blocks.acknowledged_step
        settled = [
            sequence
            for sequence in self.yielding
            if self.seats.last_step[sequence.seat_held] <= acknowledged_step
        ]
        for sequence in settled:
            self.yielding.remove(sequence)
            self._vacate(sequence)
            sequence.move(Move.SETTLE)
            self._queue(sequence, now)

    def admit(self, sequence: Sequence, now: float) -> None:
        """Puts a new sequence into the queue."""
        assert sequence.phase is Phase.QUEUED, sequence.phase
        self._queue(sequence, now)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence that ends from wherever it is; it keeps its known tokens."""
        if sequence.phase in WAITING:
            self.waiting.remove(sequence)
        else:
            if sequence.phase is Phase.YIELDING:
                self.yielding.remove(sequence)
            self._vacate(sequence)

    def acknowledge(self, step: int, now: float) -> None:
        """The results of all steps up to `step` have arrived: opens their fences."""
        self.blocks.acknowledge(step)
        self.free_seats.acknowledge(step)
        self.settle(now)

    def _vacate(self, sequence: Sequence) -> None:
        seat = sequence.seat_held
        last_step = int(self.seats.last_step[seat])
        self.blocks.retire(self.seats.blocks(seat), last_step)
        self.seats.vacate(seat)
        self.free_seats.retire(np.array([seat], np.int32), last_step)

    def _queue(self, sequence: Sequence, now: float) -> None:
        sequence.queued_s = now
        self.waiting.push(sequence)

    @property
    def yielding_block_count(self) -> int:
        """Blocks that come free when those who yield have their results."""
        return sum(int(self.seats.block_count[each.seat_held]) for each in self.yielding)
