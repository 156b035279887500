"""Step slots (scheduler → executor) and result slots (executor → scheduler).

Two step slots lie one behind the other in the `frames` region, two result slots in the `results`
region. Step N uses slot N % 2 of both. A slot of fixed layout, all words little-endian::

    step slot    header        HEADER_WORDS int64, see `Header`
                 rows          ROW_COLUMNS columns of row_max int32, see `Rows`
                 tokens        token_max pairs of int32 (token id, position)
                 assignments   assignment_max triples of int32 (seat, word, value)

    result slot  header        HEADER_WORDS int64, see `ResultHeader`
                 tokens        row_max int32: the token sampled for each row
                 faults        row_max int32, see `RowFault`

The used prefixes of rows, tokens and assignments are what a device must copy. There are no flags:
the socket word says that a slot is full, and law 2 says when it may be written again (the step
slot of N by publishing N+2, after the result of N; the result slot of N likewise).

What the writer asserts before publishing, the reader asserts after reading (`Frame.check`).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

import numpy as np
import numpy.typing as npt

from gapless.protos.messages import Epoch, StepNumber
from gapless.protos.seats import SCRATCH_SEAT, Int32s

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]

SLOT_COUNT: Final = 2
FRAME_MAGIC: Final = 0x4741504C_46524D31
RESULT_MAGIC: Final = 0x4741504C_52534C31
HEADER_WORDS: Final = 16
ROW_COLUMNS: Final = 6
ALIGNMENT_BYTES: Final = 4096
"""Slots start at page borders, so that a mapping can be pinned slot by slot."""

NO_CARRY: Final = -1
"""In `Rows.carry_row`: the row's input is the literal token of the frame."""


class Header(enum.IntEnum):
    """Words of a step slot's header."""

    MAGIC = 0
    EPOCH = 1
    STEP = 2
    ROW_COUNT = 3
    TOKEN_COUNT = 4
    ASSIGNMENT_COUNT = 5
    FEATURES = 6
    PUBLISHED_NS = 7
    """CLOCK_MONOTONIC when the scheduler began to build the frame that it then published."""


class ResultHeader(enum.IntEnum):
    """Words of a result slot's header. Stamps are CLOCK_MONOTONIC, in nanoseconds."""

    MAGIC = 0
    EPOCH = 1
    STEP = 2
    ROW_COUNT = 3
    ACCEPTED_NS = 4
    """The frame was read and its copy to the device was issued."""
    STARTED_NS = 5
    """The device began the step."""
    FINISHED_NS = 6
    """The device ended the step."""


class Features(enum.IntFlag):
    """What the rows of a step need of the sampler; a step with none is greedy throughout."""

    NONE = 0
    RANDOM = 1
    """Some row has temperature > 0."""
    TRUNCATED = 2
    """Some random row has top-k, top-p or min-p."""
    BIAS = 4
    ALLOWED = 8


class RowFault(enum.IntEnum):
    """Why a row has no token although it should have one."""

    NONE = 0
    NOT_FINITE = 1
    """Its logits hold NaN, or nothing is left to sample from."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step as columns, int32 ``[row_count]`` each.

    Row r reads the input tokens ``tokens[query_start[r] : query_start[r] + query_length[r]]``,
    which stand at the positions ``context_length[r] - query_length[r] .. context_length[r] - 1`` of
    its sequence. `carry_row` names the row of the step before (of the same epoch) whose sampled
    token replaces the row's first input token, or is NO_CARRY. `result_count` is 1 if a token is to
    be sampled behind the row's last input token (at position context_length), else 0.
    """

    seat: Int32s
    carry_row: Int32s
    query_start: Int32s
    query_length: Int32s
    context_length: Int32s
    result_count: Int32s


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """The description of one step: what a step slot says, without its place."""

    epoch: Epoch
    step: StepNumber
    rows: Rows
    token_ids: Int32s
    """``[token_count]``, packed row after row. Carried entries hold any valid id."""
    positions: Int32s
    """``[token_count]``."""
    assignments: Int32s
    """``[assignment_count, 3]``: (seat, word, value). To be applied before the step runs."""
    features: Features
    published_ns: int

    @property
    def row_count(self) -> int:
        return len(self.rows.seat)

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    @property
    def only_decodes(self) -> bool:
        """Each row has one input token."""
        return self.token_count == self.row_count

    @property
    def query_length_max(self) -> int:
        return int(self.rows.query_length.max())

    @property
    def context_length_max(self) -> int:
        return int(self.rows.context_length.max())

    def check(self) -> None:
        """Asserts everything that a writer promises a reader; cheap, as both do so each step."""
        rows, least = self.rows, np.minimum.reduce
        assert self.row_count > 0, "a step has rows"
        assert least(rows.seat) > SCRATCH_SEAT, rows.seat
        assert np.maximum.reduce(np.bincount(rows.seat)) == 1, "a seat has one row a step"
        assert least(rows.query_length) > 0, rows.query_length
        assert least(rows.context_length - rows.query_length) >= 0, rows.context_length
        ends = rows.query_start + rows.query_length
        assert rows.query_start[0] == 0, rows.query_start[0]
        assert ends[:-1].tobytes() == rows.query_start[1:].tobytes(), "rows are packed in order"
        assert ends[-1] == self.token_count == len(self.positions), (ends[-1], self.token_count)
        assert least(rows.carry_row) >= NO_CARRY, rows.carry_row
        assert np.maximum.reduce(rows.result_count.view(np.uint32)) <= 1, rows.result_count
        last = self.positions
        if not self.only_decodes:
            is_decode = rows.query_length[rows.carry_row != NO_CARRY] == 1
            assert is_decode.all(), "carried rows are decode"
            last = last[ends - 1]
        assert last.tobytes() == (rows.context_length - 1).tobytes(), "positions end at the context"


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a step sampled: row r's token and fault, int32 ``[row_count]`` each."""

    epoch: Epoch
    step: StepNumber
    tokens: Int32s
    """Meaningless where the row's result_count is 0 or it has a fault."""
    faults: Int32s
    accepted_ns: int
    started_ns: int
    finished_ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class FrameLayout:
    """Where things stand in a step slot; both sides compute it from the same three numbers."""

    row_max: int
    token_max: int
    assignment_max: int

    @property
    def rows_at(self) -> int:
        return 8 * HEADER_WORDS

    @property
    def tokens_at(self) -> int:
        return self.rows_at + 4 * ROW_COLUMNS * self.row_max

    @property
    def assignments_at(self) -> int:
        return self.tokens_at + 8 * self.token_max

    @property
    def slot_bytes(self) -> int:
        return _aligned(self.assignments_at + 12 * self.assignment_max)

    @property
    def size_bytes(self) -> int:
        """Size of the region with both slots."""
        return SLOT_COUNT * self.slot_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ResultLayout:
    """Where things stand in a result slot."""

    row_max: int

    @property
    def tokens_at(self) -> int:
        return 8 * HEADER_WORDS

    @property
    def faults_at(self) -> int:
        return self.tokens_at + 4 * self.row_max

    @property
    def slot_bytes(self) -> int:
        return _aligned(self.faults_at + 4 * self.row_max)

    @property
    def size_bytes(self) -> int:
        """Size of the region with both slots."""
        return SLOT_COUNT * self.slot_bytes


class FrameSlots:
    """Both step slots over their region: `write` for the scheduler, `read` for the executor.

    `read` copies nothing: its arrays are views, valid until the slot is written again.
    """

    def __init__(self, layout: FrameLayout, region: memoryview | bytearray) -> None:
        self.layout = layout
        self._region = region
        self._slots = [_StepSlot(layout, region, k * layout.slot_bytes) for k in range(SLOT_COUNT)]

    def slot_bytes(self, slot: int) -> Bytes:
        """A whole slot, uint8 ``[layout.slot_bytes]``: what a device pins and copies from."""
        return _slot_bytes(self._region, slot, self.layout.slot_bytes)

    def write(self, frame: Frame) -> None:
        """Puts `frame` into slot ``step % 2``. The caller holds the fence."""
        self._slots[frame.step % SLOT_COUNT].write(frame)

    def read(self, epoch: Epoch, step: StepNumber) -> Frame:
        """The frame of `step`, as views on slot ``step % 2``."""
        return self._slots[step % SLOT_COUNT].read(epoch, step)


class _StepSlot:
    def __init__(self, layout: FrameLayout, region: memoryview | bytearray, offset: int) -> None:
        self.layout = layout
        self.header: Int64s = np.frombuffer(region, np.int64, HEADER_WORDS, offset)
        self.rows: Int32s = np.frombuffer(
            region, np.int32, ROW_COLUMNS * layout.row_max, offset + layout.rows_at
        ).reshape(ROW_COLUMNS, layout.row_max)
        self._views = Rows(*self.rows)
        self.tokens: Int32s = np.frombuffer(
            region, np.int32, 2 * layout.token_max, offset + layout.tokens_at
        ).reshape(layout.token_max, 2)
        self.assignments: Int32s = np.frombuffer(
            region, np.int32, 3 * layout.assignment_max, offset + layout.assignments_at
        ).reshape(layout.assignment_max, 3)

    def write(self, frame: Frame) -> None:
        row_count, token_count = frame.row_count, frame.token_count
        assignment_count = len(frame.assignments)
        assert 0 < row_count <= self.layout.row_max, row_count
        assert 0 < token_count <= self.layout.token_max, token_count
        assert assignment_count <= self.layout.assignment_max, assignment_count
        rows, column = frame.rows, self.rows
        column[0, :row_count] = rows.seat
        column[1, :row_count] = rows.carry_row
        column[2, :row_count] = rows.query_start
        column[3, :row_count] = rows.query_length
        column[4, :row_count] = rows.context_length
        column[5, :row_count] = rows.result_count
        self.tokens[:token_count, 0] = frame.token_ids
        self.tokens[:token_count, 1] = frame.positions
        if assignment_count:
            self.assignments[:assignment_count] = frame.assignments
        self.header[:8] = (
            FRAME_MAGIC,
            frame.epoch,
            frame.step,
            row_count,
            token_count,
            assignment_count,
            frame.features,
            frame.published_ns,
        )

    def read(self, epoch: Epoch, step: StepNumber) -> Frame:
        magic, found_epoch, found_step, row_count, *others = self.header[:8].tolist()
        token_count, assignment_count, features, published_ns = others
        assert magic == FRAME_MAGIC, f"no frame in the slot of step {step}: {magic:#x}"
        assert (found_epoch, found_step) == (epoch, step), (found_epoch, found_step, epoch, step)
        return Frame(
            epoch=epoch,
            step=step,
            rows=self._views_of(row_count),
            token_ids=self.tokens[:token_count, 0],
            positions=self.tokens[:token_count, 1],
            assignments=self.assignments[:assignment_count],
            features=Features(features),
            published_ns=published_ns,
        )

    def _views_of(self, row_count: int) -> Rows:
        """The same object for as long as the number of rows stays."""
        if len(self._views.seat) != row_count:
            self._views = Rows(*self.rows[:, :row_count])
        return self._views


class ResultSlots:
    """Both result slots over their region: `write` for the executor, `read` for the scheduler."""

    def __init__(self, layout: ResultLayout, region: memoryview | bytearray) -> None:
        self.layout = layout
        self._region = region
        self._headers: list[Int64s] = []
        self._rows: list[Int32s] = []
        """Tokens and faults, ``[2, row_max]`` a slot."""
        for offset in (0, layout.slot_bytes):
            self._headers.append(np.frombuffer(region, np.int64, HEADER_WORDS, offset))
            rows = np.frombuffer(region, np.int32, 2 * layout.row_max, offset + layout.tokens_at)
            self._rows.append(rows.reshape(2, layout.row_max))

    def slot_bytes(self, slot: int) -> Bytes:
        """A whole slot, uint8 ``[layout.slot_bytes]``: what a device pins."""
        return _slot_bytes(self._region, slot, self.layout.slot_bytes)

    def landing(self, slot: int) -> Int32s:
        """What a device copies to in one piece, int32: raw stamps, tokens, faults.

        The stamps (two int64 of the device's own timer) take the last two words of the header.
        """
        offset = slot * self.layout.slot_bytes + self.layout.tokens_at - 16
        return np.frombuffer(self._region, np.int32, 4 + 2 * self.layout.row_max, offset)

    def write(self, result: Result) -> None:
        """Puts `result` into slot ``step % 2``. The caller was released by frame step + 2."""
        slot, row_count = result.step % SLOT_COUNT, len(result.tokens)
        assert 0 < row_count <= self.layout.row_max, row_count
        self._rows[slot][0, :row_count] = result.tokens
        self._rows[slot][1, :row_count] = result.faults
        self._headers[slot][:7] = (
            RESULT_MAGIC,
            result.epoch,
            result.step,
            row_count,
            result.accepted_ns,
            result.started_ns,
            result.finished_ns,
        )

    def read(self, epoch: Epoch, step: StepNumber) -> Result:
        """The result of `step`, as views on slot ``step % 2``."""
        slot = step % SLOT_COUNT
        header = self._headers[slot][:7].tolist()
        magic, found_epoch, found_step, row_count, accepted, started, finished = header
        assert magic == RESULT_MAGIC, f"no result in the slot of step {step}: {magic:#x}"
        assert (found_epoch, found_step) == (epoch, step), (found_epoch, found_step, epoch, step)
        return Result(
            epoch=epoch,
            step=step,
            tokens=self._rows[slot][0, :row_count],
            faults=self._rows[slot][1, :row_count],
            accepted_ns=accepted,
            started_ns=started,
            finished_ns=finished,
        )


def _slot_bytes(region: memoryview | bytearray, slot: int, size_bytes: int) -> Bytes:
    return np.frombuffer(region, np.uint8, size_bytes, slot * size_bytes)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
