"""The life cycle of a sequence, walked move by move."""

from __future__ import annotations

import itertools

import pytest

from gapless.scheduler import request
from gapless.scheduler.request import SEATED, TRANSITIONS, WAITING, Move, Phase, after, diagram

LEGAL = {
    (Phase.QUEUED, Move.SEAT): Phase.RUNNING,
    (Phase.QUEUED, Move.END): Phase.ENDED,
    (Phase.RUNNING, Move.REWIND): Phase.RUNNING,
    (Phase.RUNNING, Move.YIELD): Phase.YIELDING,
    (Phase.RUNNING, Move.END): Phase.ENDED,
    (Phase.YIELDING, Move.SETTLE): Phase.PREEMPTED,
    (Phase.YIELDING, Move.END): Phase.ENDED,
    (Phase.PREEMPTED, Move.SEAT): Phase.RUNNING,
    (Phase.PREEMPTED, Move.END): Phase.ENDED,
}


@pytest.mark.parametrize(("phase", "move"), list(itertools.product(Phase, Move)))
def test_every_move_from_every_phase(phase: Phase, move: Move) -> None:
    expected = LEGAL.get((phase, move))
    if expected is None:
        with pytest.raises(AssertionError, match=f"{move.name} of a sequence that is {phase.name}"):
            after(phase, move)
    else:
        assert after(phase, move) is expected


def test_the_table_names_every_phase() -> None:
    assert set(TRANSITIONS) == set(Phase)
    assert SEATED | WAITING | {Phase.ENDED} == set(Phase)
    assert not SEATED & WAITING


def test_everyone_can_end_and_nobody_goes_on_afterwards() -> None:
    for phase in set(Phase) - {Phase.ENDED}:
        assert after(phase, Move.END) is Phase.ENDED
    assert not TRANSITIONS[Phase.ENDED]


def test_every_phase_is_reached_from_the_first() -> None:
    reached, fresh = {Phase.QUEUED}, {Phase.QUEUED}
    while fresh:
        fresh = {each for phase in fresh for each in TRANSITIONS[phase].values()} - reached
        reached |= fresh
    assert reached == set(Phase)


def test_the_diagram_of_the_docstring_is_the_tables() -> None:
    assert request.__doc__ is not None
    drawn = [line.strip() for line in request.__doc__.splitlines() if "--" in line]
    assert drawn == [line.strip() for line in diagram().splitlines()]
