"""The paged attention equals a plain dense one, and reads nothing that it must not read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.executor.arenas import PlainArenas
from gapless.executor.attention import AttentionPlan, GatherAttention, PackedRows, plan_rows
from gapless.executor.kv import KvPool, KvShape

torch.set_num_threads(1)
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A step: rows as (query length, context length), and the shape of heads and blocks."""

    rows: list[tuple[int, int]]
    kv_heads: int
    group: int
    head_dim: int
    block_tokens: int
    window: int | None
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    row = st.one_of(
        st.integers(1, 70).map(lambda context: (1, context)),
        st.integers(1, 24).flatmap(
            lambda query: st.integers(query, query + 50).map(lambda context: (query, context))
        ),
    )
    return Case(
        rows=draw(st.lists(row, min_size=1, max_size=9)),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from((1, 5, 8, 16))),
        block_tokens=draw(st.sampled_from((1, 3, 4, 16))),
        window=draw(st.one_of(st.none(), st.integers(1, 40))),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(max_examples=80, deadline=None)
@given(cases())
def test_paged_attention_equals_the_dense_one_amid_poison(case: Case) -> None:
    random = torch.Generator().manual_seed(case.seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    contexts = [context for _, context in case.rows]
    heads = case.kv_heads * case.group
    sequences = [
        (
            noise(context, heads, case.head_dim),
            noise(context, case.kv_heads, case.head_dim),
            noise(context, case.kv_heads, case.head_dim),
        )
        for context in contexts
    ]
    pool, tables = _poisoned_pool(case, random)
    cells = [_cells(table, contexts[row], case.block_tokens) for row, table in enumerate(tables)]
    keys, values = pool.layer(1)
    for (query, context), cell, (_, key, value) in zip(case.rows, cells, sequences, strict=True):
        keys[cell[: context - query]] = key[: context - query]
        values[cell[: context - query]] = value[: context - query]

    def packed(which: int) -> Tensor:
        return torch.cat(
            [s[which][c - q :] for s, (q, c) in zip(sequences, case.rows, strict=True)]
        )

    attention = GatherAttention(pool, *_plan(case, tables))
    found = attention.attend(1, packed(0), packed(1), packed(2), 0.3, case.window)

    expected = torch.cat(
        [
            _dense(*sequence, 0.3, case.window)[context - query :]
            for sequence, (query, context) in zip(sequences, case.rows, strict=True)
        ]
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for cell, (_, key, value) in zip(cells, sequences, strict=True):
        assert torch.equal(keys[cell], key), "each position stands in its cell"
        assert torch.equal(values[cell], value)
    written = torch.cat(cells)
    keys[written] = torch.nan
    values[written] = torch.nan
    assert pool.tensor.isnan().all(), "nothing else was written, in this or another layer"


def _poisoned_pool(case: Case, random: torch.Generator) -> tuple[KvPool, list[Tensor]]:
    """A pool full of NaN, and a table of distinct blocks in random order for each row."""
    counts = [-(-context // case.block_tokens) for _, context in case.rows]
    block_count = 1 + sum(counts) + 2
    shape = KvShape(3, case.kv_heads, case.head_dim, case.block_tokens, torch.float64)
    pool = KvPool(PlainArenas(CPU), shape, block_count)
    pool.tensor.fill_(torch.nan)
    blocks = 1 + torch.randperm(block_count - 1, generator=random)
    return pool, list(torch.split(blocks[: sum(counts)], counts))


def _cells(table: Tensor, context: int, block_tokens: int) -> Tensor:
    positions = torch.arange(context)
    return table[positions // block_tokens] * block_tokens + positions % block_tokens


def _plan(case: Case, tables: list[Tensor]) -> tuple[PackedRows, AttentionPlan]:
    queries = torch.tensor([query for query, _ in case.rows])
    contexts = torch.tensor([context for _, context in case.rows])
    padded = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    rows = PackedRows(
        query_starts=queries.cumsum(0) - queries,
        query_lengths=queries,
        context_lengths=contexts,
        token_rows=torch.arange(len(tables)).repeat_interleave(queries),
        positions=torch.cat([torch.arange(c - q, c) for q, c in case.rows]),
        block_tables=padded,
    )
    return rows, plan_rows(queries.numpy(), contexts.numpy())


def _dense(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    """Causal attention of one whole sequence, written down plainly."""
    group = query.shape[1] // key.shape[1]
    output = torch.empty_like(query)
    for position in range(len(query)):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(query.shape[1]):
            seen = key[first : position + 1, head // group]
            weights = (seen @ query[position, head] * scaling).softmax(0)
            output[position, head] = weights @ value[first : position + 1, head // group]
    return output


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 9000)), min_size=1, max_size=70))
def test_a_plan_has_each_row_once_in_a_group_that_holds_it(rows: list[tuple[int, int]]) -> None:
    queries = np.array([query for query, _ in rows])
    contexts = queries + np.array([before for _, before in rows])
    plan = plan_rows(queries, contexts)
    assert sorted(np.concatenate([group.rows for group in plan.groups])) == list(range(len(rows)))
    for group in plan.groups:
        assert queries[group.rows].max() == group.query_length
        assert contexts[group.rows].max() == group.context_length


@pytest.mark.parametrize(
    ("queries", "contexts", "group_count"),
    [
        ([1] * 32, [200] * 32, 1),
        ([1] * 32, [40] * 31 + [9000], 2),
        ([1] * 8 + [256], [200] * 8 + [256], 2),
        ([8] * 20, [8] * 20, 1),
    ],
)
def test_one_long_row_does_not_pad_all_others(
    queries: list[int], contexts: list[int], group_count: int
) -> None:
    plan = plan_rows(np.array(queries), np.array(contexts))
    assert len(plan.groups) == group_count
