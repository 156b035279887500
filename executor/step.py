"""One step of the model: forward (carry-over, embedding, layers, head) and sample.

Owns the order of the parts. Knows nothing of slots, sockets or threads: the device loop stages
frames, keeps the tokens of the step before, and takes results away. `forward` and `sample` make no
decision that needs a value from the device and wait for nothing; both become graphs on a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gapless.executor.attention import (
    AttentionPlan,
    GatherAttention,
    PackedRows,
    StepAttention,
    plan_rows,
)
from gapless.executor.kv import KvPool
from gapless.executor.model import Model
from gapless.executor.sampler import SampleRows, sample
from gapless.executor.seats import SeatCopy
from gapless.protos.seats import Int32s
from gapless.protos.slots import Features, Frame


@dataclasses.dataclass(frozen=True, slots=True)
class StagedFrame:
    """A frame on the device. Tensors are int64; the rest is known to the host."""

    features: Features
    query_length_max: int
    context_length_max: int
    plan: AttentionPlan
    seats: Tensor
    """``[row_count]``, as are the other columns of rows."""
    carry_rows: Tensor
    query_starts: Tensor
    query_lengths: Tensor
    context_lengths: Tensor
    result_counts: Tensor
    token_ids: Tensor
    """``[token_count]``, as are positions and token_rows."""
    positions: Tensor
    token_rows: Tensor
    """The row of each token."""

    @property
    def row_count(self) -> int:
        return len(self.seats)

    @property
    def token_count(self) -> int:
        return len(self.token_ids)


class Decoder(Protocol):
    """A way from token ids to logits: `model.Model`, or another form of it."""

    def logits(
        self, token_ids: Tensor, positions: Tensor, last_tokens: Tensor, attention: StepAttention
    ) -> Tensor:
        """See `model.Model.logits`."""


class StepRunner:
    """Runs steps of one model over one KV pool and one copy of the seat table."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        seats: SeatCopy,
        row_max: int,
        decoder: Decoder | None = None,
    ) -> None:
        """The decoder takes the place of the model's own layers, if given."""
        self.model = model
        self._decoder: Decoder = decoder or model
        self.pool = pool
        self.seats = seats
        self.row_max = row_max

    def no_tokens(self) -> Tensor:
        """What stands for the previous step's tokens before the first step: int32 ``[row_max]``."""
        return torch.zeros(self.row_max, dtype=torch.int32, device=self.pool.device)

    def stage(self, frame: Frame) -> StagedFrame:
        """Copies `frame` to the device; its slot is not read again. Plans on the host."""
        rows = frame.rows
        query_lengths = rows.query_length.astype(np.int64)
        context_lengths = rows.context_length.astype(np.int64)
        token_rows = np.repeat(np.arange(frame.row_count, dtype=np.int64), query_lengths)
        return StagedFrame(
            features=frame.features,
            query_length_max=frame.query_length_max,
            context_length_max=frame.context_length_max,
            plan=plan_rows(query_lengths, context_lengths),
            seats=self._on_device(rows.seat),
            carry_rows=self._on_device(rows.carry_row),
            query_starts=self._on_device(rows.query_start),
            query_lengths=self._on_device(query_lengths),
            context_lengths=self._on_device(context_lengths),
            result_counts=self._on_device(rows.result_count),
            token_ids=self._on_device(frame.token_ids),
            positions=self._on_device(frame.positions),
            token_rows=self._on_device(token_rows),
        )

    def apply_assignments(self, assignments: Int32s) -> None:
        """Applies a frame's assignments to the seat copy; called before the step runs."""
        self.seats.apply(assignments)

    def run(self, staged: StagedFrame, previous_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Runs one step.

        Args:
            staged: the step; its assignments have been applied.
            previous_tokens: what the step before returned as tokens (or `no_tokens`), any integer
                type, on the device; the source of carried rows.

        Returns:
            Tokens and faults (see `RowFault`), int32 ``[row_count]``, on the device.
        """
        with torch.inference_mode():
            return self.sample(staged, self.forward(staged, previous_tokens))

    def forward(self, staged: StagedFrame, previous_tokens: Tensor) -> Tensor:
        """Logits behind the last token of each row, ``[row_count, vocab_size]``."""
        attention = GatherAttention(self.pool, self._packed(staged), staged.plan)
        last_tokens = staged.query_starts + staged.query_lengths - 1
        return self._decoder.logits(
            carried_over(staged, previous_tokens), staged.positions, last_tokens, attention
        )

    def sample(self, staged: StagedFrame, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and faults, int32 ``[row_count]``."""
        rows = SampleRows(staged.seats, staged.context_lengths, staged.result_counts)
        return sample(logits, rows, self.seats, staged.features)

    def _packed(self, staged: StagedFrame) -> PackedRows:
        block_count = -(-staged.context_length_max // self.pool.block_tokens)
        return PackedRows(
            query_starts=staged.query_starts,
            query_lengths=staged.query_lengths,
            context_lengths=staged.context_lengths,
            token_rows=staged.token_rows,
            positions=staged.positions,
            block_tables=self.seats.block_tables(staged.seats, block_count),
        )

    def _on_device(self, column: np.ndarray[tuple[int], np.dtype[np.integer]]) -> Tensor:
        return torch.from_numpy(column.astype(np.int64)).to(self.pool.device)


def carried_over(staged: StagedFrame, previous_tokens: Tensor) -> Tensor:
    """The step's input token ids ``[token_count]``, with carried rows continued on the device."""
    literal = staged.token_ids.index_select(0, staged.query_starts)
    sampled = previous_tokens.index_select(0, staged.carry_rows.clamp(min=0)).long()
    first = torch.where(staged.carry_rows >= 0, sampled, literal)
    return staged.token_ids.index_copy(0, staged.query_starts, first)
