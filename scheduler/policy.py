"""Who gets what: the rules of scheduling, apart from the mechanics that carry them out.

Pure functions and one small object; nothing here moves a sequence. `planner.py` asks.

* Every running sequence that can decode gets its row, before anything else.
* What is left of the step's tokens goes to prompts that run, then to sequences that wait; both in
  order of priority, then arrival. Nobody overtakes the first of the queue, but a prompt takes no
  more than half of what is left while others want some: a short one does not wait for a long one.
  What nobody wanted goes to the first ones after all.
* Blocks left for growth: a sequence is seated only if one block a running sequence stays free.
* When blocks run short, the last in that order gives way, never the first: so the first always
  gets on, and with it everybody in the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

from gapless.scheduler.config import CoreConfig
from gapless.scheduler.request import Sequence

SHARE_TOKENS_MIN: Final = 16
"""A prompt that shares a step gets so many tokens at least, if they are there: rows cost too."""


@dataclasses.dataclass(slots=True)
class StepBudget:
    """What one step may still hold."""

    rows: int
    tokens: int
    assignments: int
    chunk_tokens_max: int

    @classmethod
    def of(cls, config: CoreConfig) -> StepBudget:
        """The budget of an empty step."""
        return cls(
            rows=config.row_max,
            tokens=config.step_tokens_max,
            assignments=config.assignment_max,
            chunk_tokens_max=config.chunk_tokens_max,
        )

    @property
    def is_spent(self) -> bool:
        """No further row fits."""
        return self.rows == 0 or self.tokens == 0

    def chunk(self, remaining_tokens: int, *, is_shared: bool) -> int:
        """Tokens of a row that has `remaining_tokens` to compute; 0 if no row fits.

        `is_shared`: others want tokens of this step too.
        """
        if self.rows == 0:
            return 0
        share = max((self.tokens + 1) // 2, SHARE_TOKENS_MIN) if is_shared else self.tokens
        return min(remaining_tokens, self.chunk_tokens_max, self.tokens, share)

    def spend(self, *, rows: int = 0, tokens: int = 0, assignments: int = 0) -> None:
        self.rows -= rows
        self.tokens -= tokens
        self.assignments -= assignments
        assert min(self.rows, self.tokens, self.assignments) >= 0, self


def blocks_to_seat(config: CoreConfig, sequence: Sequence) -> int:
    """Blocks a waiting sequence gets with its seat: for all known tokens and the next one."""
    tokens = min(len(sequence.tokens) + 1, sequence.limit_length)
    return config.blocks_of(tokens)


def headroom(seated_count: int) -> int:
    """Blocks that stay free when a sequence is seated beside `seated_count` others."""
    return seated_count


def victim_of(running: Iterable[Sequence]) -> Sequence | None:
    """Who gives way when blocks run short: the last in order; None if only the first is left."""
    ordered = in_order(running)
    return ordered[-1] if len(ordered) > 1 else None


def in_order(sequences: Iterable[Sequence]) -> list[Sequence]:
    """First come the higher priority, then the earlier arrival."""
    return sorted(sequences, key=lambda sequence: sequence.order)
