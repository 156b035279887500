"""Limits and choices, by themselves."""

from __future__ import annotations

import msgspec
import pytest

from gapless.protos.messages import Epoch, ModelFacts
from gapless.scheduler.admission import sequence_of
from gapless.scheduler.config import CoreConfig
from gapless.scheduler.policy import StepBudget, blocks_to_seat, victim_of
from gapless.scheduler.request import Sequence
from tests.scheduler.words import GATEWAY, config, submit

FACTS = ModelFacts(
    revision="r",
    vocab_size=1000,
    context_length=100,
    block_tokens=16,
    block_count=5,
    row_max=8,
    token_max=32,
    device="cpu",
    dtype="float32",
)


def sequence(arrival: int, **changes: int) -> Sequence:
    return sequence_of(submit(arrival, **changes), config(), GATEWAY, arrival, now=0.0)


def test_a_chunk_is_cut_to_what_is_left() -> None:
    budget = StepBudget(rows=2, tokens=10, assignments=0, chunk_tokens_max=6)
    assert budget.chunk(4, is_shared=False) == 4
    assert budget.chunk(9, is_shared=False) == 6
    budget.spend(rows=1, tokens=6)
    assert budget.chunk(9, is_shared=False) == 4
    budget.spend(rows=1, tokens=1)
    assert budget.is_spent
    assert budget.chunk(9, is_shared=False) == 0


def test_nobody_spends_more_than_there_is() -> None:
    budget = StepBudget(rows=1, tokens=1, assignments=1, chunk_tokens_max=1)
    with pytest.raises(AssertionError):
        budget.spend(assignments=2)


def test_the_last_in_order_gives_way_and_never_the_first() -> None:
    first, low, late = sequence(1), sequence(2, priority=-1), sequence(3)
    assert victim_of([late, low, first]) is low
    assert victim_of([late, first]) is late
    assert victim_of([first]) is None
    assert victim_of([]) is None


def test_a_seat_comes_with_blocks_for_the_next_token_if_there_will_be_one() -> None:
    assert blocks_to_seat(config(), sequence(1, prompt_tokens=7)) == 2
    assert blocks_to_seat(config(), sequence(1, prompt_tokens=8)) == 3


def test_limits_are_cut_to_what_the_executor_can() -> None:
    asked = CoreConfig.from_facts(FACTS, running_max=64, queued_max=10)
    assert (asked.running_max, asked.step_tokens_max, asked.chunk_tokens_max) == (8, 32, 32)
    assert asked.sequence_tokens_max == 64, "four usable blocks hold less than the context"
    assert (asked.prompt_tokens_max, asked.seat_block_max, asked.seat_count) == (63, 4, 9)
    attach = asked.attach(Epoch(3))
    assert (attach.epoch, attach.seat_count, attach.token_max) == (3, 9, 32)
    narrow = CoreConfig.from_facts(
        msgspec.structs.replace(FACTS, block_count=100),
        running_max=4,
        queued_max=1,
        chunk_tokens_max=5,
    )
    assert narrow.sequence_tokens_max == 100
    assert narrow.chunk_tokens_max == 5


def test_a_frame_must_hold_the_largest_admission() -> None:
    with pytest.raises(AssertionError, match="one admission may need"):
        config(assignment_max=100)


def test_who_shares_a_step_takes_half_of_what_is_left() -> None:
    budget = StepBudget(rows=4, tokens=101, assignments=0, chunk_tokens_max=1000)
    assert budget.chunk(500, is_shared=True) == 51
    assert budget.chunk(7, is_shared=True) == 7, "who needs less takes less"
    assert budget.chunk(500, is_shared=False) == 101
    budget.spend(rows=1, tokens=80)
    assert budget.chunk(500, is_shared=True) == 16, "a row is worth a few tokens at least"
    budget.spend(rows=1, tokens=16)
    assert budget.chunk(500, is_shared=True) == 5, "if they are there"
