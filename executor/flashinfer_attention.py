"""FlashInfer over the paged KV pool: tensor cores, also for rows of one token.

Owns what FlashInfer wants before a step: a plan on the host, page indices on the device. See
`cuda_attention` for the seam. Made by `attention_backends`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from gapless.executor.cuda_attention import HeadShape, StepRows, Stored
from gapless.executor.kv import KvPool
from gapless.protos.seats import Int32s

WORKSPACE_BYTES: Final = 256 << 20
"""Scratch for partial results of split rows; all steps share it, one after another."""
BLOCKS_A_MULTIPROCESSOR: Final = 2
"""For so many the planner splits contexts."""


def workspace_bytes(
    heads: HeadShape, multiprocessor_count: int, captured: Iterable[tuple[int, int]]
) -> int:
    """Scratch for all steps, and at least the usual: what FlashInfer's planner asks for.

    Args:
        heads: of the model.
        multiprocessor_count: of the device.
        captured: rows and tokens of the captured steps.
    """
    group = heads.heads // heads.kv_heads
    split = BLOCKS_A_MULTIPROCESSOR * multiprocessor_count // heads.kv_heads
    most = split * _tile_queries(heads, 1 << 30)  # of a step that is not captured
    for rows, tokens in captured:
        # There is room for as many tiles as any such step could have.
        planned = _planned_tokens(rows, tokens)
        tile = _tile_queries(heads, (planned - rows + 1) * group)
        most = max(most, tile * max(split, -(-planned * group // tile) + rows - 1))
    return max(WORKSPACE_BYTES, 4 * heads.heads * most * (heads.dim + 1) + (1 << 20))


def _tile_queries(heads: HeadShape, queries: int) -> int:
    """Queries, of all heads of a group, that the kernel takes together where a row has so many."""
    if queries > 64 and heads.dim < 256:
        return 128
    return 64 if queries > 16 else 16


def _planned_tokens(rows: int, tokens: int) -> int:
    """The tokens to plan a captured step for.

    The planner takes them for one a row and the rest in one of them, and divides the queries into
    tiles for that; but of our rows most may have none.
    """
    return tokens if tokens == rows else tokens + rows


class FlashInfer(Stored):
    """FlashInfer's paged prefill kernel (tensor cores), also for rows of one token.

    Its `plan` divides the work among the multiprocessors on the host and copies the division to the
    device. The library's own `plan` is called once, to load the kernels; after that the kernels'
    planner is called directly: the wrapper around it copies from pageable memory and walks the rows
    in Python.
    """

    def __init__(
        self,
        pool: KvPool,
        heads: HeadShape,
        workspace: Tensor,
        row_count: int,
        token_max: int,
        *,
        captured: bool,
    ) -> None:
        super().__init__(pool)
        from gapless.executor.step_kernels import list_pages  # triton is where a GPU is

        self._list_pages = list_pages
        flashinfer: Any = importlib.import_module("flashinfer")
        self._heads = heads
        self._captured = captured
        device = workspace.device
        # All blocks, and one of scratch for each padded row.
        index_count = pool.block_count + row_count
        self._indices = torch.zeros(index_count, dtype=torch.int32, device=device)
        self._query_indptr_host = torch.zeros(row_count + 1, dtype=torch.int32)
        self._block_indptr_host = torch.zeros(row_count + 1, dtype=torch.int32)
        self._query_ends = self._query_indptr_host.numpy()[1:]
        self._block_ends = self._block_indptr_host.numpy()[1:]
        self._planned = (b"", b"")
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=captured,
            qo_indptr_buf=torch.zeros(row_count + 1, dtype=torch.int32, device=device),
            paged_kv_indptr_buf=torch.zeros(row_count + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=torch.ones(row_count, dtype=torch.int32, device=device),
            backend="fa2",
        )
        self._token_max = token_max
        self._load(row_count)

    def _load(self, row_count: int) -> None:
        ones = torch.arange(row_count + 1, dtype=torch.int32)
        heads = self._heads
        self._wrapper.plan(
            ones,
            ones,
            self._indices[:row_count],
            torch.ones(row_count, dtype=torch.int32),
            heads.heads,
            heads.kv_heads,
            heads.dim,
            self._pool.block_tokens,
            causal=True,
            q_data_type=heads.dtype,
            kv_data_type=heads.dtype,
        )

    def plan(self, query_lengths: Int32s, context_lengths: Int32s) -> None:
        row_count = len(query_lengths)
        block_tokens = self._pool.block_tokens
        block_counts = (context_lengths + (block_tokens - 1)) // block_tokens
        # The division depends on nothing else: while it stays, it stands on the device already.
        division = query_lengths.tobytes(), block_counts.tobytes()
        if division == self._planned:
            return
        self._planned = division
        np.add.accumulate(query_lengths, out=self._query_ends[:row_count])
        np.add.accumulate(block_counts, out=self._block_ends[:row_count])
        wrapper, heads = self._wrapper, self._heads
        token_count = int(self._query_ends[row_count - 1])
        wrapper._qo_indptr_last = self._token_max if self._captured else token_count
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            self._query_indptr_host,
            self._block_indptr_host,
            self._block_indptr_host,  # context lengths, which this kernel's planner does not read
            _planned_tokens(row_count, self._token_max) if self._captured else token_count,
            row_count,
            heads.heads,
            heads.kv_heads,
            block_tokens,
            self._captured,
            heads.dim,
            heads.dim,
            True,
            -1,
            -1,
            False,
            0,
        )

    def bind(self, rows: StepRows) -> None:
        self._rows = rows
        wrapper = self._wrapper
        row_count = len(rows.context_lengths)
        wrapper._qo_indptr_buf = rows.query_indptr
        wrapper._paged_kv_indptr_buf = torch.empty_like(rows.query_indptr)
        wrapper._paged_kv_last_page_len_buf = torch.empty_like(rows.context_lengths)
        self._list_pages(
            rows.context_lengths,
            rows.block_tables,
            self._pool.block_tokens,
            wrapper._paged_kv_indptr_buf,
            wrapper._paged_kv_last_page_len_buf,
            self._indices,
        )
        wrapper._batch_size = row_count

    def read(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor:
        assert window is None, "planned without a window"
        wrapper = self._wrapper
        wrapper._sm_scale = scaling
        output: Tensor = wrapper.run(query, self.paged(layer), out=torch.empty_like(query))
        return output
