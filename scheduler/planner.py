"""What the next step does: chooses rows by policy, and takes the blocks they need.

Reads the seats' columns, moves sequences through `placement.py`. Knows nothing of gateways,
results or time beyond handing `now` on. The core calls `plan` once a step; steady decode is one
pass of array work, whatever the number of sequences that wait.
"""

from __future__ import annotations

import numpy as np

from gapless.protos.seats import Int32s
from gapless.scheduler.config import CoreConfig
from gapless.scheduler.frames import Chunk, Plan
from gapless.scheduler.placement import Placement
from gapless.scheduler.policy import StepBudget, blocks_to_seat, headroom, in_order, victim_of
from gapless.scheduler.request import Phase, Sequence
from gapless.scheduler.seats import Bools, Indices

NO_ASSIGNMENTS: Int32s = np.empty((0, 3), np.int32)
NO_ASSIGNMENTS.flags.writeable = False


class Planner:
    """Plans the steps of one core."""

    def __init__(self, config: CoreConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._seats = placement.seats

    def plan(self, now: float) -> Plan | None:
        """The next step's rows; None if no row can run. Blocks and seats are taken."""
        placement = self._placement
        budget = StepBudget.of(self._config)
        assignments: list[Int32s] = []
        decode = self._wants_row(gap_min=1, gap_max=1).nonzero()[0]
        is_short = False
        if placement.blocks.free_count < 2 * len(decode):
            decode, is_short = self._relieve(decode, now)
        decode = self._extend(decode, assignments)
        budget.spend(rows=len(decode), tokens=len(decode), assignments=sum(map(len, assignments)))
        chunks: list[Chunk] = []
        if len(decode) < self._seats.live_count:
            self._continue_prompts(budget, chunks)
        if placement.waiting and not is_short:
            self._seat_waiting(budget, chunks, assignments)
        if len(chunks) > 1 and not budget.is_spent:
            self._widen(budget, chunks)
        if not len(decode) and not chunks:
            assert not assignments, "blocks without a row"
            return None
        seats = decode
        if chunks:
            seats = np.concatenate((decode, [chunk.seat for chunk in chunks]))
        return Plan(
            decode_seats=decode,
            seats=seats,
            chunks=tuple(chunks),
            assignments=np.concatenate(assignments) if assignments else NO_ASSIGNMENTS,
        )

    def _wants_row(self, *, gap_min: int, gap_max: int | None = None) -> Bools:
        """Seats that may get a row and have so many positions to compute."""
        seats = self._seats
        gap = seats.total_length - seats.scheduled_length
        wants = seats.runs & (seats.total_length < seats.limit_length)
        wants &= gap >= gap_min
        if gap_max is not None:
            wants &= gap <= gap_max
        return wants

    # ------------------------------------------------------------------ rows that decode

    def _extend(self, decode: Indices, assignments: list[Int32s]) -> Indices:
        """Gives a block to each row that stands at a block border."""
        needy = decode[self._needs_block(decode)]
        if len(needy):
            assignments.append(self._placement.extend(needy))
        return decode

    def _needs_block(self, decode: Indices) -> Bools:
        capacity = self._seats.block_count[decode] * self._config.block_tokens
        needs: Bools = self._seats.scheduled_length[decode] == capacity
        return needs

    def _relieve(self, decode: Indices, now: float) -> tuple[Indices, bool]:
        """Preempts until blocks suffice for this step and the next; the rows left, and whether
        blocks are short.

        What a victim frees comes a step late, behind its fence, hence the look ahead. Rows that
        find no block now are left out of this step, the last in order first.
        """
        placement, is_short = self._placement, False
        while True:
            needs = self._needs_block(decode)
            coming = placement.blocks.fenced_count + placement.yielding_block_count
            wanted = int(needs.sum()) + self._needy_next_count(decode, needs)
            if wanted <= placement.blocks.free_count + coming:
                break
            is_short = True
            holders = self._seats.holders()
            victim = victim_of(each for each in holders if each.phase is Phase.RUNNING)
            if victim is None:
                break
            placement.preempt(victim, now)
            decode = decode[self._seats.runs[decode]]
        needy = in_order(self._seats.sequence(seat) for seat in decode[needs].tolist())
        left_out = [each.seat_held for each in needy[placement.blocks.free_count :]]
        if left_out:
            is_short = True
            decode = decode[~np.isin(decode, left_out)]
        return decode, is_short

    def _needy_next_count(self, decode: Indices, needs: Bools) -> int:
        """Rows that will stand at a block border in the next step."""
        seats, block_tokens = self._seats, self._config.block_tokens
        capacity = (seats.block_count[decode] + needs) * block_tokens
        at_border = seats.scheduled_length[decode] + 1 == capacity
        goes_on = seats.total_length[decode] + 1 < seats.limit_length[decode]
        return int(np.count_nonzero(at_border & goes_on))

    # ------------------------------------------------------------------ prompts

    def _continue_prompts(self, budget: StepBudget, chunks: list[Chunk]) -> None:
        """Chunks of the prompts that run, in order, as far as the budget goes."""
        behind = self._wants_row(gap_min=2).nonzero()[0].tolist()
        others = len(behind) + len(self._placement.waiting)
        for sequence in in_order(self._seats.sequence(seat) for seat in behind):
            if budget.is_spent:
                return
            others -= 1
            chunks.append(self._chunk(sequence, budget, is_shared=others > 0))

    def _seat_waiting(
        self, budget: StepBudget, chunks: list[Chunk], assignments: list[Int32s]
    ) -> None:
        """Seats those who wait, in order, as far as budget, seats and blocks go."""
        placement = self._placement
        while not budget.is_spent and placement.free_seats.free_count:
            sequence = placement.waiting.first()
            if sequence is None:
                return
            block_count = blocks_to_seat(self._config, sequence)
            if placement.blocks.free_count < block_count + headroom(self._seats.live_count):
                return
            cost = placement.assignment_count(sequence, block_count)
            if cost > budget.assignments:
                return
            assignments.append(placement.seat(sequence, block_count))
            assert len(assignments[-1]) == cost, (len(assignments[-1]), cost)
            budget.spend(assignments=cost)
            chunks.append(self._chunk(sequence, budget, is_shared=bool(placement.waiting)))

    def _widen(self, budget: StepBudget, chunks: list[Chunk]) -> None:
        """Gives the tokens that nobody wanted to the first chunks that can use them."""
        for place, chunk in enumerate(chunks):
            missing = self._chunk_end(chunk.seat) - chunk.start - chunk.length
            room = self._config.chunk_tokens_max - chunk.length
            extra = min(missing, room, budget.tokens)
            if extra:
                budget.spend(tokens=extra)
                chunks[place] = self._cut(chunk.seat, chunk.start, chunk.length + extra)

    def _chunk(self, sequence: Sequence, budget: StepBudget, *, is_shared: bool) -> Chunk:
        """The next row of a sequence that has several known tokens to compute.

        After a rewind the last known token may stand at a border, its block not yet taken: it is
        left to a decode row.
        """
        seat = sequence.seat_held
        start = int(self._seats.scheduled_length[seat])
        length = budget.chunk(self._chunk_end(seat) - start, is_shared=is_shared)
        budget.spend(rows=1, tokens=length)
        return self._cut(seat, start, length)

    def _chunk_end(self, seat: int) -> int:
        """The position before which a row of the seat must end."""
        capacity = int(self._seats.block_count[seat]) * self._config.block_tokens
        return min(int(self._seats.total_length[seat]), capacity)

    def _cut(self, seat: int, start: int, length: int) -> Chunk:
        total = int(self._seats.total_length[seat])
        return Chunk(seat=seat, start=start, length=length, samples=start + length == total)
