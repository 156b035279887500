"""The limits of a core: frozen numbers, and everything that follows from them.

Owns nothing but arithmetic. Whoever starts a scheduler makes one `CoreConfig`, usually from the
executor's `ModelFacts`; core, seat table and slots take their sizes from it.
"""

from __future__ import annotations

import dataclasses
from typing import NewType

from gapless.protos.messages import Attach, Epoch, Limits, ModelFacts
from gapless.protos.sampling import ALLOWED_TOKENS_MAX, BIAS_ENTRIES_MAX
from gapless.protos.seats import ALLOWED_COUNT, SeatLayout
from gapless.protos.slots import FrameLayout, ResultLayout

GatewayIndex = NewType("GatewayIndex", int)
"""The shell's number for one gateway connection; never used twice by it."""

SAMPLING_WORDS_MAX = ALLOWED_COUNT + 1 + 2 * BIAS_ENTRIES_MAX + ALLOWED_TOKENS_MAX
"""Most words of a seat's record that its sampling parameters can fill."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Limits of one core. All counts; tokens where it says so."""

    running_max: int
    """Most sequences with a seat."""
    queued_max: int
    """Most requests that wait."""
    queued_tokens_max: int = 0
    """Most tokens that wait; 0 = no limit. A request that finds the queue empty may exceed it."""
    depth: int = 2
    """Most steps in flight: 2 overlaps, 1 is synchronous."""
    step_tokens_max: int
    """Most input tokens in a step."""
    chunk_tokens_max: int
    """Most input tokens of one row: longer prompts are computed in chunks."""
    row_max: int
    """Most rows in a step."""
    block_tokens: int
    block_count: int
    """Blocks of the pool, the scratch block 0 included."""
    context_length: int
    """Longest prompt plus output of the model, in tokens."""
    vocab_size: int
    assignment_max: int
    """Most seat-table assignments in a frame."""

    def __post_init__(self) -> None:
        assert 1 <= self.running_max <= self.row_max, (self.running_max, self.row_max)
        assert self.running_max <= self.step_tokens_max, "every running row fits into a step"
        assert self.queued_max >= 1, self.queued_max
        assert self.queued_tokens_max >= 0, self.queued_tokens_max
        assert self.depth in (1, 2), self.depth
        assert self.chunk_tokens_max >= 1, self.chunk_tokens_max
        assert self.block_tokens >= 1, self.block_tokens
        assert self.block_count >= 2, self.block_count
        assert self.sequence_tokens_max >= 2, "a prompt token and a new one"
        assert self.vocab_size >= 1, self.vocab_size
        assert self.assignment_max >= self.assignment_min, (
            f"{self.assignment_max} assignments, one admission may need {self.assignment_min}"
        )

    @classmethod
    def from_facts(
        cls,
        facts: ModelFacts,
        *,
        running_max: int,
        queued_max: int,
        queued_tokens_max: int = 0,
        depth: int = 2,
        step_tokens_max: int | None = None,
        chunk_tokens_max: int | None = None,
    ) -> CoreConfig:
        """Limits that fit an executor: what is asked for beyond `facts` is cut to it."""
        tokens = min(step_tokens_max or facts.token_max, facts.token_max)
        running = min(running_max, facts.row_max, tokens)
        blocks = _ceil_divide(facts.context_length, facts.block_tokens)
        return cls(
            running_max=running,
            queued_max=queued_max,
            queued_tokens_max=queued_tokens_max,
            depth=depth,
            step_tokens_max=tokens,
            chunk_tokens_max=min(chunk_tokens_max or tokens, tokens),
            row_max=facts.row_max,
            block_tokens=facts.block_tokens,
            block_count=facts.block_count,
            context_length=facts.context_length,
            vocab_size=facts.vocab_size,
            assignment_max=running + SAMPLING_WORDS_MAX + blocks,
        )

    @property
    def seat_count(self) -> int:
        """Seats of the table, the scratch seat 0 included."""
        return self.running_max + 1

    @property
    def sequence_tokens_max(self) -> int:
        """Longest prompt plus output that fits the model and, alone, the pool."""
        return min(self.context_length, (self.block_count - 1) * self.block_tokens)

    @property
    def prompt_tokens_max(self) -> int:
        """Longest prompt that leaves room for one new token."""
        return self.sequence_tokens_max - 1

    @property
    def seat_block_max(self) -> int:
        """Blocks of the longest sequence."""
        return self.blocks_of(self.sequence_tokens_max)

    @property
    def assignment_min(self) -> int:
        """What a frame must hold: a block border for each row, and the largest admission."""
        return self.running_max + SAMPLING_WORDS_MAX + self.seat_block_max

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold the KV of `tokens` positions."""
        return _ceil_divide(tokens, self.block_tokens)

    @property
    def limits(self) -> Limits:
        """What gateways are told."""
        return Limits(
            running_max=self.running_max,
            queued_max=self.queued_max,
            queued_tokens_max=self.queued_tokens_max,
            prompt_tokens_max=self.prompt_tokens_max,
            sequence_tokens_max=self.sequence_tokens_max,
        )

    @property
    def frame_layout(self) -> FrameLayout:
        return FrameLayout(self.row_max, self.step_tokens_max, self.assignment_max)

    @property
    def result_layout(self) -> ResultLayout:
        return ResultLayout(self.row_max)

    @property
    def seat_layout(self) -> SeatLayout:
        return SeatLayout(self.seat_count, self.seat_block_max)

    def attach(self, epoch: Epoch) -> Attach:
        """What an executor is told: the sizes from which it computes the same layouts."""
        return Attach(
            epoch=epoch,
            row_max=self.row_max,
            token_max=self.step_tokens_max,
            assignment_max=self.assignment_max,
            seat_count=self.seat_count,
            seat_block_max=self.seat_block_max,
        )


def _ceil_divide(number: int, divisor: int) -> int:
    return -(-number // divisor)
