"""Attention kernels for CUDA over the paged KV pool: FlashInfer and FlashAttention-3.

Owns the choice of a backend and what each needs before a step (`plan`) and a layer (`read`). One
object serves one slot and one shape of step: the plan of a step must stand until it has run, so
two steps in flight never share one. Called by the CUDA step; `attention.GatherAttention` is the
oracle for all of them.

Everything that a kernel bakes into a graph is fixed when the object is made: the number of rows,
whether it is captured, the pool, the workspace.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import importlib.util
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from gapless.executor.attention import (
    AttentionPlan,
    GatherAttention,
    Int64s,
    PackedRows,
    plan_rows,
)
from gapless.executor.kv import KvPool

WORKSPACE_BYTES: Final = 256 << 20
"""FlashInfer's scratch for partial results of split rows; all steps share it, one after another."""
FLASHINFER: Final = "flashinfer"
FA3: Final = "fa3"
GATHER: Final = "gather"


@dataclasses.dataclass(frozen=True, slots=True)
class HeadShape:
    """What a kernel is specialised for."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step on the device; addresses that a graph reads are those of the slot."""

    query_indptr: Tensor
    """int32 ``[rows + 1]``: where each row's tokens begin among the packed ones."""
    context_lengths: Tensor
    """int32 ``[rows]``."""
    block_tables: Tensor
    """int32 ``[rows, blocks]``."""
    write_slots: Tensor
    """int64 ``[tokens]``, as are token_rows and positions."""
    token_rows: Tensor
    positions: Tensor


class CudaAttention(Protocol):
    """One slot's attention for one shape of step."""

    @property
    def write_slots(self) -> Tensor: ...

    def plan(self, query_lengths: Int64s, context_lengths: Int64s) -> None:
        """Prepares a step on the host, ``[rows]`` each; copies are issued on the current stream."""

    def bind(self, rows: StepRows) -> None:
        """Prepares a step on the device, on the compute stream; part of a graph if captured."""

    def pool(self, layer: int) -> tuple[Tensor, Tensor]: ...

    def read(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor: ...

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor: ...


class _Stored(abc.ABC):
    """What both backends share: where keys and values go."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._rows: StepRows | None = None

    @property
    def rows(self) -> StepRows:
        assert self._rows is not None, "read before bind"
        return self._rows

    @property
    def write_slots(self) -> Tensor:
        return self.rows.write_slots

    def pool(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.layer(layer)

    def paged(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, ``[blocks, block_tokens, kv_heads, dim]``."""
        shape = (self._pool.block_count, self._pool.block_tokens)
        keys, values = self._pool.layer(layer)
        return keys.unflatten(0, shape), values.unflatten(0, shape)

    @abc.abstractmethod
    def read(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor: ...

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        keys, values = self._pool.layer(layer)
        keys.index_copy_(0, self.write_slots, key)
        values.index_copy_(0, self.write_slots, value)
        return self.read(layer, query.contiguous(), scaling, window)


class Gathered(_Stored):
    """The plain backend, for what no kernel serves: copies indices each step, never captured."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        self._plan: AttentionPlan | None = None
        self._gather: GatherAttention | None = None

    def plan(self, query_lengths: Int64s, context_lengths: Int64s) -> None:
        self._plan = plan_rows(query_lengths, context_lengths)

    def bind(self, rows: StepRows) -> None:
        assert self._plan is not None, "bound before planned"
        self._rows = rows
        ends = rows.query_indptr.long()
        packed = PackedRows(
            query_starts=ends[:-1],
            query_lengths=ends[1:] - ends[:-1],
            context_lengths=rows.context_lengths.long(),
            token_rows=rows.token_rows,
            positions=rows.positions,
            block_tables=rows.block_tables,
        )
        self._gather = GatherAttention(self._pool, packed, self._plan)

    def read(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor:
        assert self._gather is not None, "read before bound"
        return self._gather.read(layer, query, scaling, window)


class FlashAttention3(_Stored):
    """FlashAttention-3 (`flash_attn_interface`): everything it needs is on the device."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        self._flash: Any = importlib.import_module("flash_attn_interface")
        self._query_length_max = 1

    def plan(self, query_lengths: Int64s, context_lengths: Int64s) -> None:
        self._query_length_max = int(query_lengths.max())

    def bind(self, rows: StepRows) -> None:
        self._rows = rows

    def read(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor:
        keys, values = self.paged(layer)
        rows = self.rows
        decode = self._query_length_max == 1
        output: Tensor = self._flash.flash_attn_with_kvcache(
            query.unsqueeze(1) if decode else query,
            keys,
            values,
            cache_seqlens=rows.context_lengths,
            page_table=rows.block_tables,
            cu_seqlens_q=None if decode else rows.query_indptr,
            max_seqlen_q=None if decode else self._query_length_max,
            softmax_scale=scaling,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )
        return output.squeeze(1) if decode else output


class FlashInfer(_Stored):
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
        flashinfer: Any = importlib.import_module("flashinfer")
        self._heads = heads
        self._captured = captured
        device = workspace.device
        # All blocks, one of scratch for each padded row, and the dump.
        index_count = pool.block_count + row_count + 1
        self._indices = torch.zeros(index_count, dtype=torch.int32, device=device)
        self._query_indptr_host = torch.zeros(row_count + 1, dtype=torch.int32)
        self._block_indptr_host = torch.zeros(row_count + 1, dtype=torch.int32)
        self._context_host = torch.ones(row_count, dtype=torch.int32)
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

    def plan(self, query_lengths: Int64s, context_lengths: Int64s) -> None:
        row_count = len(query_lengths)
        block_tokens = self._pool.block_tokens
        query_indptr = self._query_indptr_host[: row_count + 1]
        block_indptr = self._block_indptr_host[: row_count + 1]
        context = self._context_host[:row_count]
        query_indptr.numpy()[1:] = query_lengths.cumsum()
        block_indptr.numpy()[1:] = (-(-context_lengths // block_tokens)).cumsum()
        context.numpy()[:] = context_lengths
        wrapper, heads = self._wrapper, self._heads
        wrapper._qo_indptr_last = int(query_indptr[-1])
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            query_indptr,
            block_indptr,
            context,
            self._token_max if self._captured else wrapper._qo_indptr_last,
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
        wrapper, block_tokens = self._wrapper, self._pool.block_tokens
        row_count = len(rows.context_lengths)
        block_counts = (rows.context_lengths + (block_tokens - 1)) // block_tokens
        ends = block_counts.cumsum(0, dtype=torch.int32)
        if self._captured:
            wrapper._qo_indptr_buf.copy_(rows.query_indptr)
            wrapper._paged_kv_indptr_buf[1:].copy_(ends)
        else:
            wrapper._qo_indptr_buf = rows.query_indptr
            wrapper._paged_kv_indptr_buf = torch.nn.functional.pad(ends, (1, 0))
            wrapper._paged_kv_last_page_len_buf = torch.empty_like(rows.context_lengths)
        wrapper._paged_kv_last_page_len_buf.copy_((rows.context_lengths - 1) % block_tokens + 1)
        # Blocks of all rows one behind the other; what lies behind a row's last goes to the dump.
        columns = torch.arange(rows.block_tables.shape[1], device=ends.device)
        used = columns < block_counts[:, None]
        places = torch.where(used, (ends - block_counts)[:, None] + columns, len(self._indices) - 1)
        self._indices.scatter_(0, places.view(-1), rows.block_tables.reshape(-1))
        wrapper._batch_size = row_count

    def read(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor:
        assert window is None, "planned without a window"
        wrapper = self._wrapper
        wrapper._sm_scale = scaling
        output: Tensor = wrapper.run(query, self.paged(layer), out=torch.empty_like(query))
        return output


def available_backends(heads: HeadShape, windows: bool) -> tuple[str, ...]:
    """Backends that are installed and serve `heads`, best first; the last one serves anything.

    `windows`: some layer has a sliding window.
    """
    found = [GATHER]
    if heads.dtype in (torch.bfloat16, torch.float16) and heads.dim in (64, 128, 256):
        if _installed("flash_attn_interface"):
            found.insert(0, FA3)
        if not windows and _installed("flashinfer"):
            found.insert(0, FLASHINFER)
    return tuple(found)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
