"""The simulation can fail: each of these broken cores is caught within a few seeds.

Where it says so, the invariants are switched off: then the tokens, or the fake executor's own
rights to its cells, must tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gapless.protos.messages import Epoch
from gapless.protos.seats import Int32s
from gapless.protos.slots import Result, Rows
from gapless.scheduler.core import Core
from gapless.scheduler.fence import FencedPool
from gapless.scheduler.placement import Placement
from gapless.scheduler.planner import Planner
from gapless.scheduler.request import Sequence
from gapless.scheduler.seats import Indices, Seats
from tests.simulation.world import Profile, simulate

SEED_COUNT = 12
BUSY = Profile(
    block_count=30, request_count=60, rewind_rate=0.06, loss_rate=0.02, checks_each_step=False
)
Patch = Callable[[pytest.MonkeyPatch], None]


def free_without_fence(patch: pytest.MonkeyPatch) -> None:
    """Blocks and seats are free as soon as they are given back."""

    def retire(pool: FencedPool, numbers: Int32s, last_step: int) -> None:
        pool._push(numbers)

    patch.setattr(FencedPool, "retire", retire)


def settle_too_early(patch: pytest.MonkeyPatch) -> None:
    """A preempted sequence gives up its blocks while its last row is in flight."""
    original = Placement.settle

    def settle(placement: Placement, now: float) -> None:
        for sequence in placement.yielding:
            placement.seats.last_step[sequence.seat_held] = -1
        original(placement, now)

    patch.setattr(Placement, "settle", settle)


def carry_from_the_wrong_row(patch: pytest.MonkeyPatch) -> None:
    original = Seats.advance

    def advance(seats: Seats, places: Indices, rows: Rows, step: Any) -> None:
        original(seats, places, rows, step)
        seats.last_row[rows.seat] = np.roll(seats.last_row[rows.seat], 1)

    patch.setattr(Seats, "advance", advance)


def name_blocks_one_place_off(patch: pytest.MonkeyPatch) -> None:
    original = Placement.extend

    def extend(placement: Placement, seats: Indices) -> Int32s:
        assignments = original(placement, seats)
        assignments[:, 1] -= 1
        return assignments

    patch.setattr(Placement, "extend", extend)


def forget_block_assignments(patch: pytest.MonkeyPatch) -> None:
    original = Placement.extend

    def extend(placement: Placement, seats: Indices) -> Int32s:
        return original(placement, seats)[:0]

    patch.setattr(Placement, "extend", extend)


def hand_out_a_block_twice(patch: pytest.MonkeyPatch) -> None:
    original = FencedPool.take

    def take(pool: FencedPool, count: int) -> Int32s:
        numbers = original(pool, count)
        if count > 3:
            numbers[1] = numbers[0]
        return numbers

    patch.setattr(FencedPool, "take", take)


def keep_kv_that_is_lost(patch: pytest.MonkeyPatch) -> None:
    original = Seats.rewind

    def rewind(seats: Seats, *, keep_kv: bool) -> None:
        original(seats, keep_kv=True)

    patch.setattr(Seats, "rewind", rewind)


def rewind_to_what_was_scheduled(patch: pytest.MonkeyPatch) -> None:
    """After a loss, positions that only a lost step would have written count as computed."""

    def rewind(seats: Seats, *, keep_kv: bool) -> None:
        if not keep_kv:
            seats.acknowledged_length[:] = 0
            seats.scheduled_length[:] = 0
        seats.total_length[:] = seats.known_length
        behind = np.maximum(seats.known_length - 1, 0)
        seats.scheduled_length[:] = np.minimum(seats.scheduled_length, behind)

    patch.setattr(Seats, "rewind", rewind)


def take_results_of_an_older_epoch(patch: pytest.MonkeyPatch) -> None:
    original = Core.result

    def result(core: Core, now: float, result: Result) -> None:
        original(core, now, dataclasses.replace(result, epoch=Epoch(core.epoch)))

    patch.setattr(Core, "result", result)


def preempt_without_moving_on(patch: pytest.MonkeyPatch) -> None:
    """Who has yielded is never seated again: everyone must finish once the faults cease."""
    original = Placement._queue

    def queue(placement: Placement, sequence: Sequence, now: float) -> None:
        if sequence.preemption_count == 0:
            original(placement, sequence, now)

    patch.setattr(Placement, "_queue", queue)


def decode_without_a_block(patch: pytest.MonkeyPatch) -> None:
    def extend(planner: Planner, decode: Indices, assignments: list[Int32s]) -> Indices:
        return decode

    patch.setattr(Planner, "_extend", extend)


MUTATIONS: tuple[Patch, ...] = (
    free_without_fence,
    settle_too_early,
    carry_from_the_wrong_row,
    name_blocks_one_place_off,
    forget_block_assignments,
    hand_out_a_block_twice,
    keep_kv_that_is_lost,
    rewind_to_what_was_scheduled,
    take_results_of_an_older_epoch,
    preempt_without_moving_on,
    decode_without_a_block,
)


def simulate_all(seeds: range) -> None:
    for seed in seeds:
        simulate(BUSY, seed)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.__name__)
def test_a_broken_core_is_caught(mutation: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        simulate_all(range(SEED_COUNT))


def test_the_same_worlds_pass_unbroken() -> None:
    simulate_all(range(3))
