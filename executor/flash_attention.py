"""FlashAttention over the paged KV pool: version 3 from its package, version 2 as torch ships it.

Neither plans on the host: everything they need is on the device. See `cuda_attention` for the seam.
Made by `attention_backends`.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch
from torch import Tensor

from gapless.executor.cuda_attention import StepRows, Stored
from gapless.executor.kv import KvPool
from gapless.protos.seats import Int32s

VARLEN_PAGE_TOKENS: Final = 256
"""torch's own kernel wants blocks of a multiple of this (`mha_varlen_fwd` in its flash_api.cpp)."""


class FlashAttention3(Stored):
    """FlashAttention-3 (`flash_attn_interface`): everything it needs is on the device."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        self._flash: Any = importlib.import_module("flash_attn_interface")
        self._query_length_max = 1

    def plan(self, query_lengths: Int32s, context_lengths: Int32s) -> None:
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


class TorchVarlen(Stored):
    """torch's `varlen_attn` with a block table (torch 2.13 and later)."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__(pool)
        assert pool.block_tokens % VARLEN_PAGE_TOKENS == 0, pool.block_tokens
        self._varlen: Any = importlib.import_module("torch.nn.attention.varlen")
        self._query_length_max = 1
        self._key_indptr: Tensor | None = None

    def plan(self, query_lengths: Int32s, context_lengths: Int32s) -> None:
        self._query_length_max = int(query_lengths.max())

    def bind(self, rows: StepRows) -> None:
        self._rows = rows
        row_count, width = rows.block_tables.shape
        # The kernel asks for it, although the block table says where a row's keys are.
        self._key_indptr = torch.arange(
            0,
            (row_count + 1) * width * self._pool.block_tokens,
            width * self._pool.block_tokens,
            dtype=torch.int32,
            device=rows.block_tables.device,
        )

    def read(self, layer: int, query: Tensor, scaling: float, window: int | None) -> Tensor:
        keys, values = self.paged(layer)
        rows = self.rows
        # One query sees its whole context, which is not causal, and that form packs grouped heads.
        behind = -1 if self._query_length_max == 1 and window is None else 0
        output: Tensor = self._varlen.varlen_attn(
            query,
            keys,
            values,
            rows.query_indptr,
            self._key_indptr,
            self._query_length_max,
            rows.block_tables.shape[1] * self._pool.block_tokens,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, behind),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=rows.context_lengths,
            block_table=rows.block_tables,
        )
        return output
