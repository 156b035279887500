"""One step on a CUDA device: staging slots, the kernels of a step, and its graphs.

Owns the device side of both slots (`SlotMemory`) and what runs over it (`CudaStep`): forward
(assignments, carry-over, embedding, layers, head) and sample (processors, sampling, stamps). Knows
no streams and no events; `cuda_device` says on which stream and when. Everything that a graph
reads or that is read after a graph ends stands in a `SlotMemory` or in `CudaStep`, outside the
graphs' memory pool.

A graph serves a *bucket* of rows. Rows behind the frame's last are padding: the scratch seat, one
token, position 0; what they write lands in the scratch block, what they sample is not copied back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from gapless.executor import kernels, step_kernels
from gapless.executor.attention_backends import GATHER, make_attention
from gapless.executor.cuda_attention import CudaAttention, HeadShape, StepRows
from gapless.executor.cuda_sampler import CudaSampler
from gapless.executor.flashinfer_attention import WORKSPACE_BYTES
from gapless.executor.fused import FusedDecoder
from gapless.executor.kv import KvPool
from gapless.executor.model import Model
from gapless.executor.seats import SeatCopy
from gapless.protos.slots import (
    HEADER_WORDS,
    ROW_COLUMNS,
    SLOT_COUNT,
    Features,
    Frame,
    FrameLayout,
)

STAMP_COUNT: Final = 2
"""Stamps of the GPU's timer a step: before its first kernel, behind its last."""
CAPTURED_ASSIGNMENTS_PER_ROW: Final = 2
"""Assignments that a graph applies, a row of the slot; a frame with more is not captured."""


class SlotMemory:
    """Device memory of one slot: the frame, and what its step leaves for others."""

    def __init__(self, layout: FrameLayout, device: torch.device) -> None:
        self.bytes = torch.zeros(
            layout.assignments_at + 12 * layout.assignment_max, dtype=torch.uint8, device=device
        )
        words = self.bytes.view(torch.int32)
        self.header = self.bytes[: 8 * HEADER_WORDS].view(torch.int64)
        self.rows = words[layout.rows_at // 4 : layout.tokens_at // 4].view(
            ROW_COLUMNS, layout.row_max
        )
        self.tokens = words[layout.tokens_at // 4 : layout.assignments_at // 4].view(-1, 2)
        self.assignments = words[layout.assignments_at // 4 :].view(-1, 3)
        # What the host gets, in one piece: stamps, tokens, faults, as `ResultSlots.landing` has it.
        self.results = torch.zeros(
            2 * STAMP_COUNT + 2 * layout.row_max, dtype=torch.int32, device=device
        )
        self.stamps = self.results[: 2 * STAMP_COUNT].view(torch.int64)
        self.sampled, self.faults = self.results[2 * STAMP_COUNT :].view(2, layout.row_max)
        """Tokens of the step (the next step carries over from here) and faults, ``[row_max]``."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Packed:
    """The rows of a step, read from its slot, with carry-over; tensors on the device."""

    rows: StepRows
    token_ids: Tensor
    positions: Tensor
    last_tokens: Tensor | None
    """None: each token is its row's last."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Graphs:
    forward: torch.cuda.CUDAGraph
    attention: CudaAttention


class CudaStep:
    """Runs steps of one model over one pool, one seat copy and two slots."""

    def __init__(
        self,
        model: Model,
        fused: FusedDecoder | None,
        pool: KvPool,
        seats: SeatCopy,
        heads: HeadShape,
        layout: FrameLayout,
        backend: str,
    ) -> None:
        self._model = model
        self._fused = fused
        self._pool = pool
        self._seats = seats
        self._heads = heads
        self._layout = layout
        self._backend = backend
        device = pool.device
        self.slots = tuple(SlotMemory(layout, device) for _ in range(SLOT_COUNT))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._logits = torch.zeros(
            layout.row_max, model.shape.vocab_size, dtype=model.shape.dtype, device=device
        )
        self._ones = np.ones(layout.row_max, np.int32)
        self._query_starts = torch.arange(layout.row_max + 1, dtype=torch.int32, device=device)
        self._sampler = CudaSampler(seats, layout.row_max, model.shape.vocab_size, device)
        self._row_places = torch.arange(layout.row_max, device=device)
        self._memory_pool = torch.cuda.graph_pool_handle()
        self._forward_graphs: dict[tuple[int, int], _Graphs] = {}
        self._sample_graphs: dict[tuple[int, int, Features], torch.cuda.CUDAGraph] = {}
        self._loose = tuple(
            self._attention(layout.row_max, layout.token_max, captured=False)
            for _ in range(SLOT_COUNT)
        )

    # ------------------------------------------------------------------ which graph

    def bucket(self, row_count: int) -> int:
        """The captured size that serves `row_count` rows: 1, 2, 4, then multiples of 8."""
        for small in (1, 2, 4):
            if row_count <= small:
                return small
        return min(-(-row_count // 8) * 8, self._layout.row_max)

    def is_captured(self, frame: Frame) -> bool:
        """Whether `frame` runs as graphs: decode rows only, few assignments."""
        return (
            self._backend != GATHER
            and frame.only_decodes
            and len(frame.assignments) <= CAPTURED_ASSIGNMENTS_PER_ROW * self._layout.row_max
        )

    def is_ready(self, slot: int, row_count: int, features: Features) -> bool:
        """Whether the graphs of such a step are there."""
        return (slot, self.bucket(row_count), features) in self._sample_graphs

    def capture(self, slot: int, row_count: int, features: Features) -> None:
        """Makes the graphs that such a step needs, if they are not there (none without a kernel).

        The slot must be at rest and the current stream the compute stream.
        """
        if self._backend == GATHER:
            return
        bucket = self.bucket(row_count)
        if (slot, bucket) not in self._forward_graphs:
            self.slots[slot].header.zero_()  # no real row: warm-up touches scratch only
            attention = self._attention(bucket, bucket, captured=True)
            attention.plan(self._ones[:bucket], self._ones[:bucket])
            self._forward_padded(slot, bucket, attention)
            graph = _captured(
                self._memory_pool, lambda: self._forward_padded(slot, bucket, attention)
            )
            self._forward_graphs[slot, bucket] = _Graphs(graph, attention)
        if (slot, bucket, features) not in self._sample_graphs:
            self.slots[slot].header.zero_()
            self._sample_padded(slot, bucket, features)
            self._sample_graphs[slot, bucket, features] = _captured(
                self._memory_pool, lambda: self._sample_padded(slot, bucket, features)
            )

    @property
    def graph_pool_bytes(self) -> int:
        """Device memory of the pool that the graphs of both slots share."""
        pool = tuple(self._memory_pool)
        return sum(
            int(segment["total_size"])
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == pool
        )

    # ------------------------------------------------------------------ a step

    def plan(self, frame: Frame) -> None:
        """Prepares the attention of `frame` on the host; copies go to the current stream."""
        slot = frame.step % SLOT_COUNT
        rows = frame.rows
        if not self.is_captured(frame):
            self._loose[slot].plan(rows.query_length, rows.context_length)
            return
        bucket = self.bucket(frame.row_count)
        contexts = np.ones(bucket, np.int32)
        contexts[: frame.row_count] = rows.context_length
        self._forward_graphs[slot, bucket].attention.plan(self._ones[:bucket], contexts)

    def run(self, frame: Frame) -> None:
        """Enqueues the step on the current stream; the slot's memory holds the frame by then."""
        slot = frame.step % SLOT_COUNT
        if self.is_captured(frame):
            bucket = self.bucket(frame.row_count)
            self._forward_graphs[slot, bucket].forward.replay()
            self._sample_graphs[slot, bucket, frame.features].replay()
        else:
            self._run_loose(frame, slot)

    # ------------------------------------------------------------------ the captured form

    def _forward_padded(self, slot: int, bucket: int, attention: CudaAttention) -> None:
        memory = self.slots[slot]
        kernels.stamp(memory.stamps, 0)
        most = min(CAPTURED_ASSIGNMENTS_PER_ROW * self._layout.row_max, len(memory.assignments))
        step_kernels.apply_assignments(memory.header, memory.assignments, self._seats, most)
        packed = self._packed_padded(slot, bucket)
        attention.bind(packed.rows)
        self._forward(packed, attention)

    def _packed_padded(self, slot: int, bucket: int) -> _Packed:
        memory = self.slots[slot]
        rows = step_kernels.decode_rows(
            memory.header,
            memory.rows,
            memory.tokens,
            self.slots[1 - slot].sampled,
            self._seats,
            bucket,
            self._pool.block_tokens,
        )
        return _Packed(
            rows=StepRows(
                self._query_starts[: bucket + 1],
                rows.context_lengths,
                rows.block_tables,
                rows.write_slots,
                self._row_places[:bucket],
                rows.positions,
            ),
            token_ids=rows.token_ids,
            positions=rows.positions,
            last_tokens=None,
        )

    def _sample_padded(self, slot: int, bucket: int, features: Features) -> None:
        memory = self.slots[slot]
        self._sample(memory, bucket, features)
        kernels.stamp(memory.stamps, 1)

    # ------------------------------------------------------------------ the loose form

    @torch.inference_mode()
    def _run_loose(self, frame: Frame, slot: int) -> None:
        """A step with prefill, or with many assignments: kernel by kernel."""
        memory = self.slots[slot]
        kernels.stamp(memory.stamps, 0)
        self._seats.apply(memory.assignments[: len(frame.assignments)])
        packed = self._packed_loose(frame, slot)
        attention = self._loose[slot]
        attention.bind(packed.rows)
        self._forward(packed, attention)
        self._sample(memory, frame.row_count, frame.features)
        kernels.stamp(memory.stamps, 1)

    def _packed_loose(self, frame: Frame, slot: int) -> _Packed:
        memory, previous = self.slots[slot], self.slots[1 - slot].sampled
        row_count, token_count = frame.row_count, frame.token_count
        rows = memory.rows[:, :row_count].long()
        seats, starts, lengths = rows[0], rows[2], rows[3]
        token_rows = torch.repeat_interleave(lengths, output_size=token_count)
        token_ids, positions = memory.tokens[:token_count].long().t().contiguous()
        carry_rows, literal = rows[1], token_ids.index_select(0, starts)
        carried = previous.index_select(0, carry_rows.clamp(min=0)).long()
        token_ids.index_copy_(0, starts, torch.where(carry_rows >= 0, carried, literal))
        block_count = -(-frame.context_length_max // self._pool.block_tokens)
        tables = self._seats.block_tables(seats, block_count)
        ends = starts + lengths
        return _Packed(
            rows=StepRows(
                torch.nn.functional.pad(ends, (1, 0)).int(),
                memory.rows[4, :row_count],
                tables,
                self._write_slots(tables, token_rows, positions),
                token_rows,
                positions,
            ),
            token_ids=token_ids,
            positions=positions,
            last_tokens=ends - 1,
        )

    # ------------------------------------------------------------------ both

    def _forward(self, packed: _Packed, attention: CudaAttention) -> None:
        token_ids, positions, last = packed.token_ids, packed.positions, packed.last_tokens
        out = self._logits[: len(packed.rows.context_lengths)]
        if self._fused is not None:
            self._fused.logits(token_ids, positions, last, attention, out)
        else:
            last = self._row_places[: len(token_ids)] if last is None else last
            out.copy_(self._model.logits(token_ids, positions, last, attention))

    def _sample(self, memory: SlotMemory, row_count: int, features: Features) -> None:
        self._sampler.sample(
            self._logits[:row_count],
            memory.header,
            memory.rows,
            features,
            memory.sampled,
            memory.faults,
        )

    def _write_slots(self, tables: Tensor, token_rows: Tensor, positions: Tensor) -> Tensor:
        block_tokens = self._pool.block_tokens
        blocks = tables[token_rows, positions // block_tokens].long()
        return blocks * block_tokens + positions % block_tokens

    def _attention(self, row_count: int, token_count: int, *, captured: bool) -> CudaAttention:
        return make_attention(
            self._backend,
            self._pool,
            self._heads,
            self._workspace,
            row_count,
            token_count,
            captured=captured,
        )


def _captured(memory_pool: Any, record: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `record` enqueues on the current stream."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=memory_pool, capture_error_mode="thread_local")
    record()
    graph.capture_end()
    return graph
