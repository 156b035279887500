"""What must hold between the parts of a core whenever no call is in progress.

Reads everything, writes nothing. Array work wherever it is about rows or blocks, so that the
simulation can afford it after every step. Each part checks itself; here stands what joins them.
"""

from __future__ import annotations

import numpy as np

from gapless.protos.seats import SCRATCH_BLOCK, Int32s
from gapless.scheduler.pipeline import Pipeline
from gapless.scheduler.placement import Placement
from gapless.scheduler.registry import Registry
from gapless.scheduler.request import Phase
from gapless.scheduler.seats import Seats


def check(placement: Placement, pipeline: Pipeline, registry: Registry) -> None:
    """Asserts every invariant, in O(live sequences + seats + blocks)."""
    seats = placement.seats
    seats.check()
    placement.blocks.check()
    placement.free_seats.check()
    _check_blocks(placement)
    _check_seats(placement)
    _check_flights(seats, pipeline)
    _check_fence(placement, pipeline)
    registry.check()
    assert len(registry) == seats.live_count + len(placement.waiting), (
        f"{len(registry)} live, {seats.live_count} seated, {len(placement.waiting)} waiting"
    )


def _check_blocks(placement: Placement) -> None:
    """Each block is free, or fenced, or in exactly one live sequence's block table."""
    seats, pool = placement.seats, placement.blocks
    places = np.arange(seats.block_table.shape[1]) < (seats.block_count * seats.live)[:, None]
    owned = seats.block_table[places]
    _check_partition(owned, pool.free_numbers(), pool.fenced_numbers(), pool.count, "block")


def _check_seats(placement: Placement) -> None:
    """Each seat is free, or fenced, or holds exactly one live sequence."""
    seats, pool = placement.seats, placement.free_seats
    live = seats.live.nonzero()[0].astype(np.int32)
    _check_partition(live, pool.free_numbers(), pool.fenced_numbers(), pool.count, "seat")
    holders = seats.holders()
    assert [sequence.seat for sequence in holders] == live.tolist(), "a seat is not its holder's"
    phases = [Phase.RUNNING if runs else Phase.YIELDING for runs in seats.runs[live].tolist()]
    assert [sequence.phase for sequence in holders] == phases, phases
    for sequence in placement.yielding:
        assert sequence.phase is Phase.YIELDING, sequence.phase
    yielding_count = seats.live_count - int(np.count_nonzero(seats.runs))
    assert yielding_count == len(placement.yielding), (yielding_count, placement.yielding)


def _check_partition(owned: Int32s, free: Int32s, fenced: Int32s, count: int, kind: str) -> None:
    everywhere = np.concatenate((owned, free, fenced))
    times = np.bincount(everywhere, minlength=count + 1)
    assert len(times) == count + 1, f"{kind} {len(times) - 1} does not exist"
    assert times[SCRATCH_BLOCK] == 0, f"scratch {kind} in use"
    assert len(everywhere) == count, f"{len(everywhere)} {kind}s of {count}"
    astray = np.count_nonzero(times[1:] != 1)
    assert not astray, f"{kind}s not in one place: {np.flatnonzero(times != 1)}"


def _check_flights(seats: Seats, pipeline: Pipeline) -> None:
    """Placeholders are exactly the rows in flight that sample."""
    expected = np.zeros(len(seats.live), np.int32)
    for flight in pipeline.flights:
        sampling = flight.seats if flight.samples is None else flight.seats[flight.samples]
        expected[sampling] += 1
        live = flight.seats[seats.live[flight.seats]]
        assert not np.count_nonzero(seats.last_step[live] < flight.step), seats.last_step
    placeholders = seats.total_length - seats.known_length
    assert not np.count_nonzero(placeholders != expected * seats.live), (placeholders, expected)
    is_behind = seats.acknowledged_length < seats.scheduled_length
    has_landed = seats.last_step <= pipeline.published_step - len(pipeline.flights)
    is_lost = is_behind & has_landed & seats.live
    assert not np.count_nonzero(is_lost), "unacknowledged without a flight"


def _check_fence(placement: Placement, pipeline: Pipeline) -> None:
    """No seat of a row in flight is free, and both pools know the last acknowledged step."""
    acknowledged_step = pipeline.published_step - len(pipeline.flights)
    assert placement.blocks.acknowledged_step == acknowledged_step, acknowledged_step
    assert placement.free_seats.acknowledged_step == acknowledged_step, acknowledged_step
    is_free = np.zeros(len(placement.seats.live), np.bool_)
    is_free[placement.free_seats.free_numbers()] = True
    for flight in pipeline.flights:
        assert not np.count_nonzero(is_free[flight.seats]), f"a seat of step {flight.step} is free"
