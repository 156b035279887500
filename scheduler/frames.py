"""From plan to frame, and from frame to seat table.

Knows the layout of rows; decides nothing. `Composer.compose` reads the seats' columns and copies,
so a frame stays what it is while the seats go on.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gapless.protos.messages import Epoch, StepNumber
from gapless.protos.seats import Int32s
from gapless.protos.slots import NO_CARRY, Features, Frame, Rows
from gapless.scheduler.seats import Indices, Seats


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A row that computes known tokens: a prompt, or part of one."""

    seat: int
    start: int
    """Position of its first token."""
    length: int
    """Input tokens."""
    samples: bool
    """It reaches the last known token, so it samples the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a step does: rows in order, first the decode rows, then the chunks."""

    decode_seats: Indices
    seats: Indices
    """Of all rows."""
    chunks: tuple[Chunk, ...]
    assignments: Int32s
    """``[n, 3]``."""

    @property
    def all_sample(self) -> bool:
        """Every row gets a token."""
        return all(chunk.samples for chunk in self.chunks)


class Composer:
    """Turns plans into frames; owns the constant columns that all steady frames share."""

    def __init__(self, row_max: int) -> None:
        self._counting = _frozen(np.arange(row_max, dtype=np.int32))
        self._ones = _frozen(np.ones(row_max, np.int32))

    def compose(
        self, plan: Plan, seats: Seats, epoch: Epoch, step: StepNumber, published_ns: int
    ) -> Frame:
        """The frame of `plan`, before `seats` advance over it."""
        decode = plan.decode_seats
        count = len(decode)
        positions = seats.scheduled_length[decode]
        carry_row = np.where(
            seats.known_length[decode] > positions, NO_CARRY, seats.last_row[decode]
        )
        rows = Rows(
            seat=decode.astype(np.int32),
            carry_row=carry_row,
            query_start=self._counting[:count],
            query_length=self._ones[:count],
            context_length=positions + 1,
            result_count=self._ones[:count],
        )
        # A carried entry holds whatever the log has there: the executor replaces it.
        token_ids = seats.log[decode, positions]
        if plan.chunks:
            rows = _with_chunks(rows, plan.chunks)
            ends = [(chunk.seat, chunk.start, chunk.start + chunk.length) for chunk in plan.chunks]
            token_ids = np.concatenate(
                [token_ids, *(seats.log[seat, start:end] for seat, start, end in ends)]
            )
            positions = np.concatenate(
                [positions, *(np.arange(start, end, dtype=np.int32) for _, start, end in ends)]
            )
        return Frame(
            epoch=epoch,
            step=step,
            rows=rows,
            token_ids=token_ids,
            positions=positions,
            assignments=plan.assignments,
            features=Features(int(np.bitwise_or.reduce(seats.features[plan.seats]))),
            published_ns=published_ns,
        )


def _with_chunks(rows: Rows, chunks: tuple[Chunk, ...]) -> Rows:
    """`rows` of a decode step, and behind them one row a chunk."""
    length = np.array([chunk.length for chunk in chunks], np.int32)
    start = np.array([chunk.start for chunk in chunks], np.int32)
    samples = np.array([chunk.samples for chunk in chunks], np.int32)
    query_start = len(rows.seat) + np.cumsum(length, dtype=np.int32) - length

    def column(decode: Int32s, chunk: Int32s) -> Int32s:
        return np.concatenate((decode, chunk), dtype=np.int32)

    return Rows(
        seat=column(rows.seat, np.array([chunk.seat for chunk in chunks], np.int32)),
        carry_row=column(rows.carry_row, np.full(len(chunks), NO_CARRY, np.int32)),
        query_start=column(rows.query_start, query_start),
        query_length=column(rows.query_length, length),
        context_length=column(rows.context_length, start + length),
        result_count=column(rows.result_count, samples),
    )


def apply_assignments(table: Int32s, assignments: Int32s) -> None:
    """Writes assignments, int32 ``[n, 3]`` of (seat, word, value), into a seat table.

    The shell applies each frame's to the shared table before it publishes the frame, so that the
    table always says what all frames so far have said. They are absolute: twice is harmless.
    """
    if len(assignments):
        table[assignments[:, 0], assignments[:, 1]] = assignments[:, 2]


def _frozen(column: Int32s) -> Int32s:
    column.flags.writeable = False
    return column
