"""The seat table: one record of int32 words a seat, written by the scheduler alone.

A *seat* is a running sequence's stable place. What a step must know of a sequence beyond its
rows stands here. The executor keeps a copy on the device: it uploads the whole table once an
epoch, and from then on applies the assignments ``(seat, word, value)`` that frames carry. They are
absolute, so applying one twice is harmless. Seat 0 is scratch: padded rows point at it.

::

    word  0            1      2      3      4         5          6           7              8..15
          temperature  top_p  min_p  top_k  seed low  seed high  bias count  allowed count  reserved
    word  blocks_at..        block table, block ids in order of position; unused entries are 0
          bias_tokens_at..   BIAS_ENTRIES_MAX ids,    bias_values_at.. as many float32
          allowed_at..       ALLOWED_TOKENS_MAX ids

Floats stand as the bits of float32. Block 0 is scratch as well.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import numpy.typing as npt

from gapless.protos.sampling import ALLOWED_TOKENS_MAX, BIAS_ENTRIES_MAX, Sampling

Int32s = npt.NDArray[np.int32]

SCRATCH_SEAT: Final = 0
SCRATCH_BLOCK: Final = 0

TEMPERATURE: Final = 0
TOP_P: Final = 1
MIN_P: Final = 2
TOP_K: Final = 3
SEED_LOW: Final = 4
SEED_HIGH: Final = 5
BIAS_COUNT: Final = 6
ALLOWED_COUNT: Final = 7
HEAD_WORDS: Final = 16


@dataclasses.dataclass(frozen=True, slots=True)
class SeatLayout:
    """Where things stand in a record; both sides compute it from the same two numbers."""

    seat_count: int
    """Records in the table, the scratch seat included."""
    block_max: int
    """Length of a block table: blocks of the longest sequence."""

    @property
    def blocks_at(self) -> int:
        return HEAD_WORDS

    @property
    def bias_tokens_at(self) -> int:
        return self.blocks_at + self.block_max

    @property
    def bias_values_at(self) -> int:
        return self.bias_tokens_at + BIAS_ENTRIES_MAX

    @property
    def allowed_at(self) -> int:
        return self.bias_values_at + BIAS_ENTRIES_MAX

    @property
    def words(self) -> int:
        """Length of a record."""
        return self.allowed_at + ALLOWED_TOKENS_MAX

    @property
    def size_bytes(self) -> int:
        """Size of the region."""
        return 4 * self.words * self.seat_count

    def table(self, region: memoryview | bytearray) -> Int32s:
        """The region as int32 ``[seat_count, words]``, sharing its memory."""
        flat = np.frombuffer(region, dtype=np.int32, count=self.words * self.seat_count)
        return flat.reshape(self.seat_count, self.words)

    def sampling_words(self, sampling: Sampling) -> tuple[Int32s, Int32s]:
        """`sampling` as (word indices, values), both int32 ``[n]``.

        Only the used part of the lists is named; the counts say how much that is.
        """
        floats = np.array(
            [sampling.temperature, sampling.top_p, sampling.min_p], dtype=np.float32
        ).view(np.int32)
        seed = np.array([sampling.seed], dtype=np.uint64).view(np.int32)
        bias_count = len(sampling.bias_tokens)
        allowed_count = len(sampling.allowed_tokens)
        assert bias_count == len(sampling.bias_values) <= BIAS_ENTRIES_MAX, bias_count
        assert allowed_count <= ALLOWED_TOKENS_MAX, allowed_count
        head = np.array([sampling.top_k, *seed, bias_count, allowed_count], dtype=np.int32)
        values = [floats, head]
        indices = [np.arange(TEMPERATURE, ALLOWED_COUNT + 1, dtype=np.int32)]
        if bias_count:
            span = np.arange(bias_count, dtype=np.int32)
            indices += [self.bias_tokens_at + span, self.bias_values_at + span]
            values += [
                np.array(sampling.bias_tokens, dtype=np.int32),
                np.array(sampling.bias_values, dtype=np.float32).view(np.int32),
            ]
        if allowed_count:
            indices.append(self.allowed_at + np.arange(allowed_count, dtype=np.int32))
            values.append(np.array(sampling.allowed_tokens, dtype=np.int32))
        return np.concatenate(indices), np.concatenate(values)
