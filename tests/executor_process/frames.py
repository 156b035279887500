"""Frames and regions for tests of the executor's process half, in plain memory."""

from __future__ import annotations

import numpy as np

from gapless.executor.device import Regions
from gapless.protos.messages import Attach, Epoch, StepNumber
from gapless.protos.seats import Int32s, SeatLayout
from gapless.protos.slots import (
    NO_CARRY,
    Features,
    Frame,
    FrameLayout,
    FrameSlots,
    ResultLayout,
    ResultSlots,
    Rows,
)

EPOCH = Epoch(3)
ATTACH = Attach(
    epoch=EPOCH, row_max=4, token_max=16, assignment_max=32, seat_count=5, seat_block_max=4
)


def regions(attach: Attach = ATTACH) -> Regions:
    """Zeroed regions as large as `attach` says."""
    frames = FrameLayout(attach.row_max, attach.token_max, attach.assignment_max)
    results = ResultLayout(attach.row_max)
    seats = SeatLayout(attach.seat_count, attach.seat_block_max)
    return Regions(
        frames=FrameSlots(frames, bytearray(frames.size_bytes)),
        results=ResultSlots(results, bytearray(results.size_bytes)),
        seat_table=seats.table(bytearray(seats.size_bytes)),
    )


def int32s(*values: int) -> Int32s:
    return np.array(values, dtype=np.int32)


def no_assignments() -> Int32s:
    return np.empty((0, 3), dtype=np.int32)


def one_row(
    step: int,
    token_ids: tuple[int, ...],
    *,
    position: int = 0,
    carry_row: int = NO_CARRY,
    epoch: Epoch = EPOCH,
    assignments: Int32s | None = None,
) -> Frame:
    """A greedy step of one row: seat 1 reads `token_ids` from `position` on, then samples."""
    count = len(token_ids)
    return Frame(
        epoch=epoch,
        step=StepNumber(step),
        rows=Rows(
            seat=int32s(1),
            carry_row=int32s(carry_row),
            query_start=int32s(0),
            query_length=int32s(count),
            context_length=int32s(position + count),
            result_count=int32s(1),
        ),
        token_ids=int32s(*token_ids),
        positions=np.arange(position, position + count, dtype=np.int32),
        assignments=no_assignments() if assignments is None else assignments,
        features=Features.NONE,
        published_ns=0,
    )
