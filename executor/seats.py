"""The executor's copy of the seat table, on the device.

Owns one int32 tensor with the records of `protos.seats`. Written whole once an epoch (`upload`),
then only by the assignments that frames carry (`apply`). Knows nothing of steps or models. Called
by the device loop (upload, apply) and read by the step through the column views.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gapless.protos import seats
from gapless.protos.sampling import ALLOWED_TOKENS_MAX, BIAS_ENTRIES_MAX
from gapless.protos.seats import Int32s, SeatLayout


class SeatCopy:
    """Device copy of the seat table; `rows` arguments are int64 seat numbers ``[rows]``."""

    def __init__(self, layout: SeatLayout, device: torch.device) -> None:
        self.layout = layout
        self._table = torch.zeros(layout.seat_count, layout.words, dtype=torch.int32, device=device)

    @property
    def table(self) -> Tensor:
        """The records, int32 ``[seat_count, words]``, for kernels that read them in place."""
        return self._table

    def upload(self, table: Int32s) -> None:
        """Replaces the whole copy by the scheduler's int32 ``[seat_count, words]``."""
        assert table.shape == tuple(self._table.shape), (table.shape, self._table.shape)
        self._table.copy_(torch.from_numpy(np.ascontiguousarray(table)))

    def apply(self, assignments: Int32s | Tensor) -> None:
        """Applies ``[n, 3]`` (seat, word, value) by one scatter; applying them twice is harmless.

        No two assignments of a frame give one word different values: a scatter has no order.
        """
        if len(assignments) == 0:
            return
        given = torch.as_tensor(assignments).to(self._table.device)
        places = given[:, 0].long() * self.layout.words + given[:, 1]
        self._table.view(-1).index_put_((places,), given[:, 2])

    def block_tables(self, rows: Tensor, block_count: int) -> Tensor:
        """First `block_count` entries of the block tables, int32 ``[rows, block_count]``."""
        assert block_count <= self.layout.block_max, (block_count, self.layout.block_max)
        start = self.layout.blocks_at
        return self._table[:, start : start + block_count].index_select(0, rows)

    def temperature(self, rows: Tensor) -> Tensor:
        """float32 ``[rows]``."""
        return self._floats(seats.TEMPERATURE, rows)

    def top_p(self, rows: Tensor) -> Tensor:
        """float32 ``[rows]``."""
        return self._floats(seats.TOP_P, rows)

    def min_p(self, rows: Tensor) -> Tensor:
        """float32 ``[rows]``."""
        return self._floats(seats.MIN_P, rows)

    def top_k(self, rows: Tensor) -> Tensor:
        """int32 ``[rows]``; 0 keeps all."""
        return self._column(seats.TOP_K, rows)

    def seed(self, rows: Tensor) -> Tensor:
        """int64 ``[rows]`` with the bits of the unsigned 64-bit seeds."""
        low = self._column(seats.SEED_LOW, rows).long() & 0xFFFFFFFF
        return (self._column(seats.SEED_HIGH, rows).long() << 32) | low

    def bias(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids int64 and values float32, ``[rows, BIAS_ENTRIES_MAX]``; unused pairs (0, 0)."""
        layout = self.layout
        tokens = self._span(layout.bias_tokens_at, BIAS_ENTRIES_MAX, rows)
        values = self._span(layout.bias_values_at, BIAS_ENTRIES_MAX, rows).view(torch.float32)
        used = self._used(seats.BIAS_COUNT, BIAS_ENTRIES_MAX, rows)
        return torch.where(used, tokens, 0).long(), torch.where(used, values, 0.0)

    def allowed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids int64 ``[rows, ALLOWED_TOKENS_MAX]`` and which of them are used, bool."""
        tokens = self._span(self.layout.allowed_at, ALLOWED_TOKENS_MAX, rows)
        return tokens.long(), self._used(seats.ALLOWED_COUNT, ALLOWED_TOKENS_MAX, rows)

    def _column(self, word: int, rows: Tensor) -> Tensor:
        return self._table[:, word].index_select(0, rows)

    def _floats(self, word: int, rows: Tensor) -> Tensor:
        return self._column(word, rows).view(torch.float32)

    def _span(self, start: int, length: int, rows: Tensor) -> Tensor:
        return self._table[:, start : start + length].index_select(0, rows)

    def _used(self, count_word: int, length: int, rows: Tensor) -> Tensor:
        places = torch.arange(length, dtype=torch.int32, device=self._table.device)
        return places[None, :] < self._column(count_word, rows)[:, None]
