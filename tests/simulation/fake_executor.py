"""An executor that computes hashes instead of logits, from the same slots and the same seat table.

It reads real frames from real slot memory, keeps its own copy of the seat table, carries tokens
over from its own last outputs, reads and writes KV cells through block tables only, and poisons
whatever it has no right to give: padded outputs, rows without a result.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from gapless.protos.messages import Attach, Epoch, StepDone, StepNumber
from gapless.protos.seats import SCRATCH_BLOCK, SEED_HIGH, SEED_LOW, Int32s, SeatLayout
from gapless.protos.slots import (
    NO_CARRY,
    Frame,
    FrameSlots,
    Result,
    ResultSlots,
    RowFault,
)
from tests.simulation.model import CHAIN, MARKS, MASK, SPREAD, START, VOCAB_SIZE, Words

Indices = npt.NDArray[np.intp]

POISON_TOKEN = -7
POISON_CELL = np.uint64(0xDEADDEADDEADDEAD)
_CHAIN = np.uint64(CHAIN)
_CHAIN_INVERSE = pow(CHAIN, -1, 1 << 64)
_SPREAD = np.uint64(SPREAD)
_MARKS: Words = np.array([*MARKS, *(0xBAD << shift for shift in range(-POISON_TOKEN))], np.uint64)
"""Behind the marks of the vocabulary those that a poisoned id, being negative, finds."""


def mix_words(words: Words) -> Words:
    """`model.mix` for a column of words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


class FakeMemory:
    """The KV cells, which outlive an executor: uint64 ``[block_count, block_tokens]``."""

    def __init__(self, block_count: int, block_tokens: int) -> None:
        self.cells: Words = np.full((block_count, block_tokens), POISON_CELL)
        self.is_free: npt.NDArray[np.bool_] = np.ones(block_count, np.bool_)
        """The scratch block counts as free for ever: nobody may write there."""
        self._spare = self.is_free.copy()

    def poison_free(self, free_blocks: Int32s) -> None:
        """Poisons the blocks that have come free since the last call: their last legal moment."""
        free, was_free = self._spare, self.is_free
        free[:] = False
        free[SCRATCH_BLOCK] = True
        free[free_blocks] = True
        newly_free = free > was_free
        if np.count_nonzero(newly_free):
            self.cells[newly_free] = POISON_CELL
        self.is_free, self._spare = free, was_free

    def poison_all(self) -> None:
        """The owner of the memory died."""
        self.cells[:] = POISON_CELL


class FakeExecutor:
    """One life of an executor. Steps are accepted, run in order, and their results written."""

    def __init__(
        self,
        attach: Attach,
        memory: FakeMemory,
        frames: FrameSlots,
        results: ResultSlots,
        shared_table: Int32s,
        *,
        checks_all: bool,
    ) -> None:
        """`checks_all` looks at every frame; otherwise at every eighth."""
        self._checks_all = checks_all
        self.epoch = attach.epoch
        self._layout = SeatLayout(attach.seat_count, attach.seat_block_max)
        self._memory = memory
        self._frames = frames
        self._results = results
        self.table = shared_table.copy()
        self._outputs: Int32s = np.full(attach.row_max, POISON_TOKEN, np.int32)
        self._counting = np.arange(attach.row_max + 1)
        position = np.arange(attach.seat_block_max * memory.cells.shape[1])
        self._causal: npt.NDArray[np.bool_] = position <= position[:, None]
        """``[position, position]``: whether attention at the first one reads the second."""
        self.accepted: deque[StepNumber] = deque()
        self._last_step: int | None = None
        self.fault_row: int | None = None
        """If set, this row of the next step has no valid token."""
        self.row_count = 0
        """Rows of the last step that ran."""

    def accept(self, step: StepNumber) -> None:
        """The word that a frame is in its slot."""
        self.accepted.append(step)

    def run(self) -> StepDone:
        """Runs the oldest accepted step and writes its result."""
        step = self.accepted.popleft()
        assert self._last_step is None or step == self._last_step + 1, (step, self._last_step)
        frame = self._frames.read(Epoch(self.epoch), step)
        if self._checks_all or step % 8 == 0:
            frame.check()
        if len(frame.assignments):
            self.table[frame.assignments[:, 0], frame.assignments[:, 1]] = frame.assignments[:, 2]
        tokens = self._forward(frame)
        count = self.row_count = frame.row_count
        faults = np.zeros(count, np.int32)
        tokens[frame.rows.result_count == 0] = POISON_TOKEN
        if self.fault_row is not None and self.fault_row < count:
            tokens[self.fault_row] = POISON_TOKEN
            faults[self.fault_row] = RowFault.NOT_FINITE
        self.fault_row = None
        self._outputs[:count] = tokens
        self._outputs[count:] = POISON_TOKEN
        self._last_step = step
        self._results.write(
            Result(
                Epoch(self.epoch), step, tokens, faults, accepted_ns=0, started_ns=0, finished_ns=1
            )
        )
        return StepDone(Epoch(self.epoch), step)

    def _forward(self, frame: Frame) -> Int32s:
        """Writes the cells of all input tokens; the next token of every row, ``[row_count]``."""
        rows, cells = frame.rows, self._memory.cells
        block_tokens = cells.shape[1]
        ids = frame.token_ids.copy()
        carried = (rows.carry_row != NO_CARRY).nonzero()[0]
        if len(carried):
            ids[rows.query_start[carried]] = self._outputs[rows.carry_row[carried]]
        longest = int(rows.context_length.max())
        place_count = -(-longest // block_tokens)
        blocks_at = self._layout.blocks_at
        tables = self.table[rows.seat, blocks_at : blocks_at + place_count].astype(np.intp)
        last = rows.context_length - 1
        longer = (rows.query_length > 1).nonzero()[0]
        decode_count = int(longer[0]) if len(longer) else len(last)
        for row in range(decode_count, len(last)):
            start, length = int(rows.query_start[row]), int(rows.query_length[row])
            self._write_chunk(tables[row], ids[start : start + length], int(last[row]))
        read = cells.take(tables, axis=0).reshape(len(last), place_count * block_tokens)
        self._write_decode(tables, read, last[:decode_count], ids)
        is_read = self._causal.take(last, axis=0)[:, : place_count * block_tokens]
        seeds = self.table[rows.seat, SEED_LOW : SEED_HIGH + 1].view(np.uint64)[:, 0]
        digest = read.sum(axis=1, where=is_read) + seeds * _SPREAD
        digest += rows.context_length.astype(np.uint64)
        return (mix_words(digest) % np.uint64(VOCAB_SIZE)).astype(np.int32)

    def _write_decode(self, tables: Indices, read: Words, last: Int32s, ids: Int32s) -> None:
        """One cell for each of the leading rows, which have one input token: in `read`, too."""
        cells, row = self._memory.cells, self._counting[: len(last)]
        # A row at position 0 has no cell before it; what it finds there is replaced.
        before = read[row, last - 1]
        before[last == 0] = START
        written = before * _CHAIN + _MARKS[ids[: len(last)]]
        read[row, last] = written
        place = last // cells.shape[1]
        blocks = tables[row, place]
        self._check_writable(blocks)
        cells[blocks, last - place * cells.shape[1]] = written

    def _write_chunk(self, table: Indices, ids: Int32s, last: int) -> None:
        """Cells of one row with several input tokens, ending at position `last`.

        The chain is linear in its marks, so it is a sum once each is divided by its power.
        """
        cells, block_tokens = self._memory.cells, self._memory.cells.shape[1]
        first, count = last + 1 - len(ids), len(ids)
        cell = START
        if first:
            place, offset = divmod(first - 1, block_tokens)
            cell = int(cells[table[place], offset])
        powers = np.full(count, _CHAIN)
        inverses = np.full(count, np.uint64(_CHAIN_INVERSE))
        powers, inverses = np.cumprod(powers), np.cumprod(inverses)
        sums = np.cumsum(_MARKS[ids] * inverses, dtype=np.uint64) + np.uint64(cell & MASK)
        position = np.arange(first, last + 1)
        blocks = table[position // block_tokens]
        self._check_writable(blocks)
        cells[blocks, position % block_tokens] = sums * powers

    def _check_writable(self, blocks: Indices) -> None:
        """Even a surplus row, whose token nobody misses, writes only where nobody else may."""
        assert not np.count_nonzero(self._memory.is_free[blocks]), "a row writes into a free block"
