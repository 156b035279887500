"""Attention over the paged KV pool on CUDA: what a step needs of a backend, and the plain one.

Owns the seam (`CudaAttention`): what a backend gets before a step (`plan`, `bind`) and a layer
(`read`). One object serves one slot and one shape of step: the plan of a step must stand until it
has run, so two steps in flight never share one. Knows no kernels: those stand in `flash_attention`
and `flashinfer_attention`. Made by `attention_backends`, called by the CUDA step; `Gathered` is the
oracle for all of them.

Everything that a kernel bakes into a graph is fixed when the object is made: the number of rows,
whether it is captured, the pool, the workspace.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gapless.executor.attention import (
    AttentionPlan,
    GatherAttention,
    PackedRows,
    plan_rows,
)
from gapless.executor.kv import KvPool
from gapless.protos.seats import Int32s


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

    def plan(self, query_lengths: Int32s, context_lengths: Int32s) -> None:
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


class Stored(abc.ABC):
    """What all backends share: where keys and values go."""

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


class Gathered(Stored):
    """The plain backend, for what no kernel serves: copies indices each step, never captured."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        self._plan: AttentionPlan | None = None
        self._gather: GatherAttention | None = None

    def plan(self, query_lengths: Int32s, context_lengths: Int32s) -> None:
        self._plan = plan_rows(query_lengths.astype(np.int64), context_lengths.astype(np.int64))

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
