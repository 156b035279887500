"""Which sizes of step have graphs, and whose graph serves a step.

Owns the sizes (`Shape`), what is made at the start, and the choice among what has been made. Knows
no GPU: `cuda_step` makes the graphs and says so here. Called by it alone.

A graph serves a *bucket* of rows and tokens; what stands behind the frame's last is padding. At the
start, decode steps get graphs for powers of two. A bucket between them is served by the next larger
graph, and gets its own once it was wanted so often that this pays: making one stops the device.
Steps with few prompt tokens are captured too: there, launching the kernels takes longer than
running them.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from typing import Final

from gapless.protos.slots import SLOT_COUNT, Features, Frame

PROMPT_TOKENS_UNIT: Final = 64
"""Buckets of steps with prompts are multiples of this, from eight of them on of its double."""
PROMPT_TOKENS_MAX: Final = 1024
"""Steps of more tokens keep the GPU busy for longer than it takes to launch their kernels."""
PROMPT_ROWS_MAX: Final = 64
"""FlashInfer divides a captured step into tiles for long queries, which waste time on many rows of
one token. An 8B model's kernels took 15 ms so launched and 18 captured at 64 rows, where the whole
step took 24 and 18; at 128 rows the waste cancelled the gain."""
CAPTURED_ASSIGNMENTS_PER_ROW: Final = 2
"""Assignments that a graph applies, a row of the slot; a frame with more is not captured."""
WANTED_MIN: Final = 256
"""Steps that a larger graph serves before their bucket gets its own.

That takes 30 to 60 ms a slot, and saves 0.1 to 2 ms a step: most where rows are many.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What a forward graph serves: up to so many rows and tokens."""

    rows: int
    tokens: int
    only_decodes: bool
    """Each row has one token."""


@dataclasses.dataclass(frozen=True, slots=True)
class Serving:
    """The graphs that a step runs."""

    forward: Shape
    sample_rows: int


class Buckets:
    """The sizes of one model's steps."""

    def __init__(
        self, row_max: int, token_max: int, *, captures: bool, captures_prompts: bool
    ) -> None:
        """Nothing is captured, decode steps alone, or steps with prompts as well."""
        self._row_max = min(row_max, token_max)  # each row of a step has a token
        self._token_max = token_max
        self._captures = captures
        self._captures_prompts = captures and captures_prompts
        self._forwards: set[tuple[int, Shape]] = set()
        self._decode_rows: tuple[list[int], ...] = tuple([] for _ in range(SLOT_COUNT))
        self._sample_rows: dict[tuple[int, Features], list[int]] = collections.defaultdict(list)
        self._wanted: collections.Counter[tuple[Serving, Features]] = collections.Counter()

    def rows(self, row_count: int) -> int:
        """The bucket of `row_count` rows: 1, 2, 4, then multiples of 8."""
        bucket = -(-row_count // 8) * 8 if row_count > 4 else 1 << (row_count - 1).bit_length()
        return min(bucket, self._row_max)

    def decode_shape(self, row_count: int) -> Shape:
        """For steps in which `row_count` rows have one token each."""
        return Shape(self.rows(row_count), self.rows(row_count), only_decodes=True)

    def prompt_shape(self, row_count: int, token_count: int) -> Shape | None:
        """For steps with prompts, if there is one."""
        rows = min(self._row_max, PROMPT_ROWS_MAX)
        tokens_max = min(PROMPT_TOKENS_MAX, self._token_max)
        if not self._captures_prompts or row_count > rows or token_count > tokens_max:
            return None
        unit = (
            PROMPT_TOKENS_UNIT if token_count <= 8 * PROMPT_TOKENS_UNIT else 2 * PROMPT_TOKENS_UNIT
        )
        return Shape(rows, min(-(-token_count // unit) * unit, tokens_max), only_decodes=False)

    def at_start(self) -> list[Shape]:
        """All with prompts, and decode rows by powers of two: the largest first.

        The others find room in what it leaves to the pool.
        """
        if not self._captures:
            return []
        tokens = range(min(PROMPT_TOKENS_MAX, self._token_max), 0, -PROMPT_TOKENS_UNIT)
        prompts = [self.prompt_shape(1, count) for count in tokens]
        powers = range(self._row_max.bit_length() - 1, -1, -1)
        rows = [self._row_max, *(1 << power for power in powers)]
        shapes = [*prompts, *(self.decode_shape(count) for count in rows)]
        return list(dict.fromkeys(shape for shape in shapes if shape is not None))

    def shape_of(self, frame: Frame) -> Shape | None:
        """The bucket of `frame`; None if it runs kernel by kernel."""
        assignments_max = CAPTURED_ASSIGNMENTS_PER_ROW * self._row_max
        if not self._captures or len(frame.assignments) > assignments_max:
            return None
        if frame.only_decodes:
            return self.decode_shape(frame.row_count)
        return self.prompt_shape(frame.row_count, frame.token_count)

    def has_forward(self, slot: int, shape: Shape) -> bool:
        """Whether `made_forward` was told of it."""
        return (slot, shape) in self._forwards

    def has_sample(self, slot: int, rows: int, features: Features) -> bool:
        """Whether `made_sample` was told of it."""
        return rows in self._sample_rows[slot, features]

    def made_forward(self, slot: int, shape: Shape) -> None:
        """There is a forward graph of this shape now."""
        self._forwards.add((slot, shape))
        if shape.only_decodes:
            bisect.insort(self._decode_rows[slot], shape.rows)

    def made_sample(self, slot: int, rows: int, features: Features) -> None:
        """There is a sample graph for so many rows now."""
        bisect.insort(self._sample_rows[slot, features], rows)

    def serving(self, frame: Frame) -> Serving | None:
        """The graphs that `frame` runs; None if it runs kernel by kernel."""
        shape = self.shape_of(frame)
        if shape is None:
            return None
        found = self._found(frame, shape)
        assert found is not None, f"step {frame.step}: no graph was made for it"
        return found

    def wants_own(self, frame: Frame) -> bool:
        """Whether graphs should be made for the bucket of `frame` first. Asked once a step."""
        shape = self.shape_of(frame)
        if shape is None:
            return False
        found = self._found(frame, shape)
        if found is None:
            return True
        own = Serving(shape, self.rows(frame.row_count))
        if found == own:
            return False
        self._wanted[own, frame.features] += 1
        return self._wanted[own, frame.features] > WANTED_MIN

    def _found(self, frame: Frame, shape: Shape) -> Serving | None:
        """The graphs of the frame's bucket, else the next larger ones, if there are any."""
        slot = frame.step % SLOT_COUNT
        sample_rows = _at_least(self._sample_rows[slot, frame.features], self.rows(frame.row_count))
        if sample_rows is None:
            return None
        if (slot, shape) in self._forwards:
            return Serving(shape, sample_rows)
        rows = _at_least(self._decode_rows[slot], shape.rows) if shape.only_decodes else None
        return None if rows is None else Serving(self.decode_shape(rows), sample_rows)


def _at_least(rising: list[int], least: int) -> int | None:
    """The first of `rising` that is not less than `least`."""
    place = bisect.bisect_left(rising, least)
    return rising[place] if place < len(rising) else None
