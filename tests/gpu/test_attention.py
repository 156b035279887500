"""Every attention backend against the gather, over random tables, lengths and chunk mixtures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gapless.executor.arenas import PlainArenas
from gapless.executor.attention import Int64s
from gapless.executor.attention_backends import (
    FA3,
    FLASHINFER,
    VARLEN,
    available_backends,
    make_attention,
)
from gapless.executor.cuda_attention import CudaAttention, Gathered, HeadShape, StepRows
from gapless.executor.flashinfer_attention import WORKSPACE_BYTES
from gapless.executor.kv import KvPool, KvShape

HEADS = HeadShape(32, 8, 128, torch.bfloat16)
BLOCK_TOKENS = {FLASHINFER: 16, FA3: 16, VARLEN: 256}
BLOCK_COUNT = {16: 3000, 256: 200}
BOUND = 8e-3
"""Relative error between two kernels that both compute in bfloat16."""


def backend(name: str, pool: KvPool, row_count: int, token_count: int) -> CudaAttention:
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    return make_attention(name, pool, HEADS, workspace, row_count, token_count, captured=False)


def empty_pool(name: str) -> KvPool:
    block_tokens = BLOCK_TOKENS[name]
    if name not in available_backends(HEADS, windows=False, block_tokens=block_tokens):
        reason = f"torch {torch.__version__} lacks it" if name == VARLEN else "it is not installed"
        pytest.skip(f"{name}: {reason}")
    shape = KvShape(1, HEADS.kv_heads, HEADS.dim, block_tokens, HEADS.dtype)
    return KvPool(PlainArenas(torch.device("cuda")), shape, BLOCK_COUNT[block_tokens])


@pytest.mark.parametrize(
    ("name", "window"), [(FLASHINFER, None), (FA3, None), (FA3, 50), (VARLEN, None), (VARLEN, 50)]
)
@pytest.mark.parametrize("longest_query", [1, 3, 200])
@pytest.mark.parametrize("row_count", [1, 7, 32])
def test_against_the_gather(
    name: str, window: int | None, longest_query: int, row_count: int
) -> None:
    random = np.random.default_rng([longest_query, row_count])
    pool = empty_pool(name)
    for _ in range(4):
        queries = random.integers(1, longest_query + 1, row_count)
        contexts = queries + random.integers(0, 900, row_count) * random.integers(0, 2, row_count)
        rows, token_count = random_rows(random, pool, queries, contexts)
        attention = backend(name, pool, row_count, token_count)
        # Only what the rows may see is finite.
        pool.tensor.fill_(float("nan"))
        fill_visible(pool, rows, contexts)
        shape = (token_count, HEADS.heads, HEADS.dim)
        query = torch.randn(shape, device="cuda", dtype=HEADS.dtype)
        key, value = torch.randn(
            2, token_count, HEADS.kv_heads, HEADS.dim, device="cuda", dtype=HEADS.dtype
        )
        found = []
        for each in (attention, Gathered(pool)):
            each.plan(queries.astype(np.int32), contexts.astype(np.int32))
            each.bind(rows)
            found.append(each.attend(0, query, key, value, HEADS.dim**-0.5, window).double())
        assert bool((found[0] - found[1]).norm() / found[1].norm() < BOUND)


def random_rows(
    random: np.random.Generator, pool: KvPool, queries: Int64s, contexts: Int64s
) -> tuple[StepRows, int]:
    """Rows over blocks in random order."""
    block_tokens = pool.block_tokens
    block_counts = -(-contexts // block_tokens)
    tables = np.zeros((len(queries), int(block_counts.max())), np.int32)
    blocks = random.permutation(np.arange(1, pool.block_count, dtype=np.int32))
    for row, count in enumerate(block_counts):
        tables[row, :count], blocks = blocks[:count], blocks[count:]
    token_rows = np.repeat(np.arange(len(queries)), queries)
    starts = contexts - queries
    offsets = np.arange(queries.sum()) - np.repeat(queries.cumsum() - queries, queries)
    positions = starts[token_rows] + offsets
    places = tables[token_rows, positions // block_tokens].astype(np.int64) * block_tokens
    indptr = np.concatenate([[0], queries.cumsum()]).astype(np.int32)
    slots = places + positions % block_tokens
    rows = StepRows(
        query_indptr=on_device(indptr, np.int32),
        context_lengths=on_device(contexts, np.int32),
        block_tables=on_device(tables, np.int32),
        write_slots=on_device(slots, np.int64),
        token_rows=on_device(token_rows, np.int64),
        positions=on_device(positions, np.int64),
    )
    return rows, int(queries.sum())


def on_device(array: npt.NDArray[np.signedinteger], dtype: type[np.integer]) -> torch.Tensor:
    return torch.from_numpy(array.astype(dtype)).cuda()


def fill_visible(pool: KvPool, rows: StepRows, contexts: Int64s) -> None:
    keys, values = pool.layer(0)
    for row, length in enumerate(contexts.tolist()):
        positions = torch.arange(length, device="cuda")
        blocks = rows.block_tables[row, positions // pool.block_tokens].long()
        places = blocks * pool.block_tokens + positions % pool.block_tokens
        keys[places] = torch.randn(length, HEADS.kv_heads, HEADS.dim, device="cuda").to(pool.dtype)
        values[places] = torch.randn_like(keys[places])
