"""One step on a CUDA device: staging slots, the kernels of a step, and its graphs.

Owns the device side of both slots (`SlotMemory`) and what runs over it (`CudaStep`): forward
(assignments, carry-over, embedding, layers, head) and sample (processors, sampling, stamps). Knows
no streams and no events; `cuda_device` says on which stream and when. Everything that a graph
reads or that is read after a graph ends stands in a `SlotMemory` or in `CudaStep`, outside the
graphs' memory pool.

Which graph serves a step is `buckets`' business. What stands behind the frame's last is padding: it
writes to the scratch block, and what it samples is not copied back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from gapless.executor import kernels, step_kernels
from gapless.executor.attention_backends import FLASHINFER, GATHER, make_attention
from gapless.executor.buckets import CAPTURED_ASSIGNMENTS_PER_ROW, Buckets, Serving, Shape
from gapless.executor.cuda_attention import CudaAttention, HeadShape, StepRows
from gapless.executor.cuda_sampler import CudaSampler
from gapless.executor.flashinfer_attention import workspace_bytes
from gapless.executor.fused import FusedDecoder
from gapless.executor.kv import KvPool
from gapless.executor.model import Model
from gapless.executor.seats import SeatCopy
from gapless.protos.seats import Int32s
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
        self.buckets = Buckets(
            layout.row_max,
            layout.token_max,
            captures=backend != GATHER,
            captures_prompts=backend == FLASHINFER,
        )
        device = pool.device
        self.slots = tuple(SlotMemory(layout, device) for _ in range(SLOT_COUNT))
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        captured = [(shape.rows, shape.tokens) for shape in self.buckets.at_start()]
        scratch_bytes = workspace_bytes(heads, multiprocessors, captured)
        self._workspace = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
        self._logits = torch.zeros(
            layout.row_max, model.shape.vocab_size, dtype=model.shape.dtype, device=device
        )
        self._sampler = CudaSampler(seats, layout.row_max, model.shape.vocab_size, device)
        self._memory_pool = torch.cuda.graph_pool_handle()
        self._forward_graphs: dict[tuple[int, Shape], _Graphs] = {}
        self._sample_graphs: dict[tuple[int, int, Features], torch.cuda.CUDAGraph] = {}
        self._loose = tuple(
            self._attention(layout.row_max, layout.token_max, captured=False)
            for _ in range(SLOT_COUNT)
        )

    # ------------------------------------------------------------------ graphs

    def capture(self, frame: Frame) -> None:
        """Makes the graphs of the bucket of `frame`, where they are not there."""
        slot, shape = frame.step % SLOT_COUNT, self.buckets.shape_of(frame)
        if shape is not None:
            self.capture_forward(slot, shape)
            self.capture_sample(slot, frame.row_count, frame.features)

    def capture_forward(self, slot: int, shape: Shape) -> None:
        """Makes the graph of a shape, if it is not there.

        The slot must be at rest and the current stream the compute stream.
        """
        if self.buckets.has_forward(slot, shape):
            return
        memory = self.slots[slot]
        memory.header.zero_()  # no real row: warm-up touches scratch only
        most = min(CAPTURED_ASSIGNMENTS_PER_ROW * self._layout.row_max, len(memory.assignments))
        attention = self._attention(shape.rows, shape.tokens, captured=True)
        one = np.ones(1, np.int32)
        attention.plan(*_padded(shape, one, one))
        self._forward(slot, shape, attention, most)
        graph = _captured(self._memory_pool, lambda: self._forward(slot, shape, attention, most))
        self._forward_graphs[slot, shape] = _Graphs(graph, attention)
        self.buckets.made_forward(slot, shape)

    def capture_sample(self, slot: int, row_count: int, features: Features) -> None:
        """Makes the sample graph for so many rows, likewise."""
        key = slot, self.buckets.rows(row_count), features
        if self.buckets.has_sample(*key):
            return
        self.slots[slot].header.zero_()
        self._sample(*key)
        self._sample_graphs[key] = _captured(self._memory_pool, lambda: self._sample(*key))
        self.buckets.made_sample(*key)

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

    def plan(self, frame: Frame, serving: Serving | None) -> None:
        """Prepares the attention of `frame` on the host; copies go to the current stream.

        Args:
            frame: of the step.
            serving: what `buckets` say of it, as for `run`.
        """
        slot, rows = frame.step % SLOT_COUNT, frame.rows
        if serving is None:
            self._loose[slot].plan(rows.query_length, rows.context_length)
            return
        shape = serving.forward
        padded = _padded(shape, rows.query_length, rows.context_length)
        self._forward_graphs[slot, shape].attention.plan(*padded)

    def run(self, frame: Frame, serving: Serving | None) -> None:
        """Enqueues the step on the current stream; the slot's memory holds the frame by then."""
        slot = frame.step % SLOT_COUNT
        if serving is None:
            self._run_loose(frame, slot)
            return
        self._forward_graphs[slot, serving.forward].forward.replay()
        self._sample_graphs[slot, serving.sample_rows, frame.features].replay()

    @torch.inference_mode()
    def _run_loose(self, frame: Frame, slot: int) -> None:
        """A step that no graph serves: kernel by kernel."""
        shape = Shape(frame.row_count, frame.token_count, only_decodes=frame.only_decodes)
        self._forward(
            slot, shape, self._loose[slot], len(frame.assignments), frame.context_length_max
        )
        self._sample(slot, frame.row_count, frame.features)

    def _forward(
        self,
        slot: int,
        shape: Shape,
        attention: CudaAttention,
        assignment_count: int,
        context_max: int | None = None,
    ) -> None:
        """From the slot's frame to the logits of its rows; a graph is a record of this.

        Args:
            slot: of the step.
            shape: rows and tokens to compute, at least those of the frame.
            attention: planned for the shape.
            assignment_count: the most that the frame may have.
            context_max: of the rows, if known.
        """
        memory = self.slots[slot]
        kernels.stamp(memory.stamps, 0)
        if assignment_count:
            step_kernels.apply_assignments(
                memory.header, memory.assignments, self._seats, assignment_count
            )
        packed = step_kernels.read_rows(
            memory.header,
            memory.rows,
            memory.tokens,
            self.slots[1 - slot].sampled,
            self._seats,
            shape.rows,
            shape.tokens,
            self._pool.block_tokens,
        )
        block_max = None if context_max is None else -(-context_max // self._pool.block_tokens)
        attention.bind(
            StepRows(
                packed.query_starts,
                packed.context_lengths,
                packed.block_tables[:, :block_max],
                packed.write_slots,
                packed.token_rows,
                packed.positions,
            )
        )
        token_ids, positions, last = packed.token_ids, packed.positions, packed.last_tokens
        out = self._logits[: shape.rows]
        if self._fused is None:
            out.copy_(self._model.logits(token_ids, positions, last, attention))
        else:
            chosen = None if shape.only_decodes else last
            self._fused.logits(token_ids, positions, chosen, attention, out)

    def _sample(self, slot: int, row_count: int, features: Features) -> None:
        """From the logits of the first rows to the slot's results; a graph is a record of this."""
        memory = self.slots[slot]
        self._sampler.sample(
            self._logits[:row_count],
            memory.header,
            memory.rows,
            features,
            memory.sampled,
            memory.faults,
        )
        kernels.stamp(memory.stamps, 1)

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


def _padded(shape: Shape, query_lengths: Int32s, context_lengths: Int32s) -> tuple[Int32s, Int32s]:
    """Lengths of all rows of a shape: padding has no token, and a context of one."""
    lengths, contexts = np.zeros(shape.rows, np.int32), np.ones(shape.rows, np.int32)
    lengths[: len(query_lengths)] = query_lengths
    contexts[: len(context_lengths)] = context_lengths
    return lengths, contexts


def _captured(memory_pool: Any, record: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `record` enqueues on the current stream."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=memory_pool, capture_error_mode="thread_local")
    record()
    graph.capture_end()
    return graph
