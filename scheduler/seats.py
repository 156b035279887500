"""The sequences that run, as arrays over seats: the one place of everything a step needs.

A struct of arrays with named columns; index = seat. Steady decode reads and writes columns for all
rows at once. The lengths of a seat, in tokens (= positions), grow from right to left::

    acknowledged <= scheduled < total <= limit      acknowledged < known <= total

    known         tokens whose ids are known here
    total         known, and those that rows in flight will sample (placeholders)
    scheduled     positions whose KV some published step writes
    acknowledged  positions whose KV a result has confirmed
    limit         total at which the sequence gets no more rows

A row computes positions scheduled .. at most total - 1, and samples a token if it reaches the end.
Only `placement.py`, `planner.py` (through `advance`) and `intake.py` write here; whoever else
reads must not keep a view. This file knows nothing of policy, pools or time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gapless.protos.messages import StepNumber
from gapless.protos.sampling import Sampling
from gapless.protos.seats import Int32s
from gapless.protos.slots import Features, Rows
from gapless.scheduler.config import CoreConfig
from gapless.scheduler.request import NO_TOKENS, Sequence

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]
Int64s = npt.NDArray[np.int64]

NO_STOP_TOKEN = -1
"""Fills the unused places of the stop-token table; no token has this id."""
STOP_WIDTH_MIN = 4
NO_STEP = -1
"""In `last_step`: no row yet."""


class Seats:
    """Columns over ``config.seat_count`` seats; the scratch seat 0 stays empty."""

    def __init__(self, config: CoreConfig) -> None:
        count = config.seat_count
        self._block_tokens = config.block_tokens
        self._counting: Int32s = np.arange(count, dtype=np.int32)
        self.sequences: list[Sequence | None] = [None] * count
        self.live: Bools = np.zeros(count, np.bool_)
        """A live sequence holds the seat. Rows in flight of a seat that is not are surplus."""
        self.runs: Bools = np.zeros(count, np.bool_)
        """It may get rows (false while it yields)."""
        self.awaits_first: Bools = np.zeros(count, np.bool_)
        """It has not got its first new token."""
        self.has_strings: Bools = np.zeros(count, np.bool_)
        self.known_length: Int32s = np.zeros(count, np.int32)
        self.total_length: Int32s = np.zeros(count, np.int32)
        self.scheduled_length: Int32s = np.zeros(count, np.int32)
        self.acknowledged_length: Int32s = np.zeros(count, np.int32)
        self.limit_length: Int32s = np.zeros(count, np.int32)
        self.min_length: Int32s = np.zeros(count, np.int32)
        """Known tokens from which on stop tokens count."""
        self.last_step: Int64s = np.full(count, NO_STEP, np.int64)
        """The last published step that has a row of the seat."""
        self.last_row: Int32s = np.zeros(count, np.int32)
        """Its row there."""
        self.features: Int32s = np.zeros(count, np.int32)
        self.handle: Int64s = np.zeros(count, np.int64)
        self.gateway: Int64s = np.zeros(count, np.int64)
        self.stop_tokens: Int32s = np.full((count, STOP_WIDTH_MIN), NO_STOP_TOKEN, np.int32)
        self.block_count: Int32s = np.zeros(count, np.int32)
        """Blocks its record in the shared table names; like that, it outlives the sequence."""
        self.block_table: Int32s = np.zeros((count, config.seat_block_max), np.int32)
        # Zeroed memory is taken when first touched, so the log costs what its sequences need.
        self.log: Int32s = np.zeros((count, config.sequence_tokens_max), np.int32)
        """Token ids; ``log[seat, :known_length[seat]]`` is the sequence so far."""
        self.live_count = 0
        self.awaits_first_count = 0
        self.has_strings_count = 0
        self._stop_width_of: Int32s = np.zeros(count, np.int32)
        self.stop_width = 0
        """Columns of `stop_tokens` in use by some seat."""

    def occupy(self, seat: int, sequence: Sequence, blocks: Int32s) -> None:
        """Puts a sequence with no computed position on a free seat, with its blocks."""
        assert self.sequences[seat] is None, f"seat {seat} is taken"
        known_length, block_count = len(sequence.tokens), len(blocks)
        self.sequences[seat] = sequence
        self.log[seat, :known_length] = sequence.tokens
        self.known_length[seat] = known_length
        self.total_length[seat] = known_length
        self.limit_length[seat] = sequence.limit_length
        self.min_length[seat] = sequence.min_length
        self.block_table[seat, :block_count] = blocks
        self.block_count[seat] = block_count
        self.features[seat] = features_of(sequence.sampling)
        self.handle[seat] = sequence.handle
        self.gateway[seat] = sequence.gateway
        self._set_stop_tokens(seat, sequence.stopping.stop_tokens)
        self.live[seat] = self.runs[seat] = True
        self.has_strings[seat] = sequence.matcher is not None
        self.awaits_first[seat] = sequence.first_token_s is None
        self._count()
        sequence.seat = seat
        sequence.tokens = NO_TOKENS

    def vacate(self, seat: int) -> Sequence:
        """Takes the sequence, with its known tokens, off its seat; the seat is empty then.

        `last_step` and `block_count` stay: the fence and the shared table still need them.
        """
        sequence = self.sequence(seat)
        sequence.tokens = self.log[seat, : self.known_length[seat]].copy()
        sequence.seat = None
        self.sequences[seat] = None
        for column in (
            self.live,
            self.runs,
            self.awaits_first,
            self.has_strings,
            self.known_length,
            self.total_length,
            self.scheduled_length,
            self.acknowledged_length,
            self.limit_length,
            self.min_length,
            self.features,
        ):
            column[seat] = 0
        self._set_stop_tokens(seat, ())
        self._count()
        return sequence

    def sequence(self, seat: int) -> Sequence:
        """The live sequence on `seat`."""
        sequence = self.sequences[seat]
        assert sequence is not None, f"seat {seat} is empty"
        return sequence

    def blocks(self, seat: int) -> Int32s:
        """Its blocks in order of position, a view."""
        return self.block_table[seat, : self.block_count[seat]]

    def holders(self) -> list[Sequence]:
        """The live sequences, by seat."""
        return [sequence for sequence in self.sequences if sequence is not None]

    def append_blocks(self, seats: Indices, blocks: Int32s) -> Int32s:
        """Gives each of `seats` one more block; the places in their block tables, ``[n]``."""
        places = self.block_count[seats]
        self.block_table[seats, places] = blocks
        self.block_count[seats] = places + 1
        return places

    def advance(self, seats: Indices, rows: Rows, step: StepNumber) -> None:
        """Marks the rows of a step, one each of `seats`, as published."""
        self.scheduled_length[seats] = rows.context_length
        self.total_length[seats] += rows.result_count
        self.last_step[seats] = step
        self.last_row[seats] = self._counting[: len(seats)]

    def rewind(self, *, keep_kv: bool) -> None:
        """All seats back to what is acknowledged: no step is in flight any more."""
        if not keep_kv:
            self.acknowledged_length[:] = 0
        self.scheduled_length[:] = self.acknowledged_length
        self.total_length[:] = self.known_length

    def token_seen(self, seat: int) -> None:
        """Marks that the seat's sequence has got its first new token."""
        self.awaits_first[seat] = False
        self.awaits_first_count -= 1

    def _set_stop_tokens(self, seat: int, stop_tokens: tuple[int, ...]) -> None:
        width = len(stop_tokens)
        if width > self.stop_tokens.shape[1]:
            wider = np.full((len(self.live), 2 * width), NO_STOP_TOKEN, np.int32)
            wider[:, : self.stop_tokens.shape[1]] = self.stop_tokens
            self.stop_tokens = wider
        self.stop_tokens[seat, : self._stop_width_of[seat]] = NO_STOP_TOKEN
        self.stop_tokens[seat, :width] = stop_tokens
        self._stop_width_of[seat] = width
        self.stop_width = int(self._stop_width_of.max())

    def _count(self) -> None:
        self.live_count = int(np.count_nonzero(self.live))
        self.awaits_first_count = int(np.count_nonzero(self.awaits_first))
        self.has_strings_count = int(np.count_nonzero(self.has_strings))

    def check(self) -> None:
        """Asserts what holds for each seat by itself."""
        live = self.live
        assert not live[0], "the scratch seat is empty"
        known, total = self.known_length, self.total_length
        scheduled, acknowledged = self.scheduled_length, self.acknowledged_length
        assert not np.count_nonzero(acknowledged > scheduled), (acknowledged, scheduled)
        assert not np.count_nonzero((acknowledged < known) != live), (acknowledged, known, live)
        assert not np.count_nonzero(known > total), (known, total)
        assert not np.count_nonzero(total > self.limit_length), (total, self.limit_length)
        assert not np.count_nonzero((scheduled < total) != live), (scheduled, total, live)
        capacity = self.block_count * self._block_tokens
        assert not np.count_nonzero(scheduled > capacity), "KV without a block"
        assert not np.count_nonzero(self.runs > live), "an empty seat runs"
        assert self.live_count == np.count_nonzero(live), self.live_count


def some(flags: Bools) -> bool:
    """Whether any flag is set: ``flags.any()``, without the Python layer that doubles its cost."""
    return bool(np.count_nonzero(flags))


def features_of(sampling: Sampling) -> Features:
    """What a row with these parameters needs of the sampler."""
    features = Features.NONE
    if sampling.temperature > 0:
        features |= Features.RANDOM
        if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
            features |= Features.TRUNCATED
    if sampling.bias_tokens:
        features |= Features.BIAS
    if sampling.allowed_tokens:
        features |= Features.ALLOWED
    return features
