"""From a frame on the device to what the model's kernels read: a step's first kernels, in Triton.

Owns the reading of a slot's rows by the GPU itself, with carry-over: a captured step learns from
the slot alone how many rows it has, which seats they have and where their input comes from. Knows
the layout of `protos.slots` and of the seat table, and nothing of models. Called by the CUDA step
and by the attention that wants its pages listed.

Rows behind the frame's last are padding: the scratch seat, token 0 at position 0, one token of
context.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.executor.seats import SeatCopy
from gapless.protos.seats import SCRATCH_SEAT
from gapless.protos.slots import NO_CARRY, Header

ASSIGNMENTS_A_PROGRAM: Final = 256
COLUMNS: Final = 256
"""Entries of a block table that a program copies at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeRows:
    """One token for each of a step's rows, carried over where the frame says so."""

    token_ids: Tensor
    """int64 ``[rows]``, as are positions and write_slots."""
    positions: Tensor
    write_slots: Tensor
    context_lengths: Tensor
    """int32 ``[rows]``."""
    block_tables: Tensor
    """int32 ``[rows, block_max]``."""


@triton.jit
def _apply_assignments(
    header, assignments, table, words, most, COUNT: tl.constexpr, LANES: tl.constexpr
):
    places = tl.program_id(0) * LANES + tl.arange(0, LANES)
    used = places < tl.minimum(tl.load(header + COUNT), most)
    seat = tl.load(assignments + 3 * places, mask=used, other=0).to(tl.int64)
    word = tl.load(assignments + 3 * places + 1, mask=used, other=0)
    value = tl.load(assignments + 3 * places + 2, mask=used, other=0)
    tl.store(table + seat * words + word, value, mask=used)


def apply_assignments(header: Tensor, assignments: Tensor, seats: SeatCopy, most: int) -> None:
    """Applies the frame's assignments, ``[n, 3]`` (seat, word, value), but at most `most`."""
    _apply_assignments[(triton.cdiv(most, ASSIGNMENTS_A_PROGRAM),)](
        header,
        assignments,
        seats.table,
        seats.layout.words,
        most,
        int(Header.ASSIGNMENT_COUNT),
        ASSIGNMENTS_A_PROGRAM,
        num_warps=4,
    )


@triton.jit
def _decode_rows(
    header,
    rows,
    tokens,
    previous,
    table,
    token_ids,
    positions,
    write_slots,
    contexts,
    block_tables,
    row_max,
    words,
    blocks_at,
    block_max,
    block_tokens,
    ROW_COUNT: tl.constexpr,
    SCRATCH: tl.constexpr,
    NO_CARRY: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    real = row < tl.load(header + ROW_COUNT)
    seat = tl.load(rows + row, mask=real, other=SCRATCH).to(tl.int64)
    carry = tl.load(rows + row_max + row, mask=real, other=NO_CARRY)
    context = tl.load(rows + 4 * row_max + row, mask=real, other=1)
    position = tl.load(tokens + 2 * row + 1, mask=real, other=0)
    carried = carry >= 0
    literal = tl.load(tokens + 2 * row, mask=real & ~carried, other=0)
    token = tl.load(previous + carry, mask=real & carried, other=0)
    tl.store(token_ids + row, tl.where(carried, token, literal).to(tl.int64))
    tl.store(positions + row, position.to(tl.int64))
    tl.store(contexts + row, context)
    blocks = table + seat * words + blocks_at
    block = tl.load(blocks + position // block_tokens).to(tl.int64)
    tl.store(write_slots + row, block * block_tokens + position % block_tokens)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < block_max
    entries = tl.load(blocks + columns, mask=inside, other=0)
    tl.store(block_tables + row.to(tl.int64) * block_max + columns, entries, mask=inside)


def decode_rows(
    header: Tensor,
    rows: Tensor,
    tokens: Tensor,
    previous: Tensor,
    seats: SeatCopy,
    bucket: int,
    block_tokens: int,
) -> DecodeRows:
    """Reads the rows of a step in which each has one token.

    Args:
        header: int64 words of the slot.
        rows: int32 ``[ROW_COLUMNS, row_max]``, see `protos.slots.Rows`.
        tokens: int32 pairs (token id, position), ``[>= bucket, 2]``.
        previous: int32 ``[row_max]``, what the step before sampled.
        seats: whose block tables to take.
        bucket: rows of the result.
        block_tokens: of the pool.
    """
    device = rows.device
    token_ids, positions, write_slots = torch.empty(3, bucket, dtype=torch.int64, device=device)
    block_max = seats.layout.block_max
    found = DecodeRows(
        token_ids,
        positions,
        write_slots,
        torch.empty(bucket, dtype=torch.int32, device=device),
        torch.empty(bucket, block_max, dtype=torch.int32, device=device),
    )
    _decode_rows[(bucket, triton.cdiv(block_max, COLUMNS))](
        header,
        rows,
        tokens,
        previous,
        seats.table,
        token_ids,
        positions,
        write_slots,
        found.context_lengths,
        found.block_tables,
        rows.shape[1],
        seats.layout.words,
        seats.layout.blocks_at,
        block_max,
        block_tokens,
        int(Header.ROW_COUNT),
        SCRATCH_SEAT,
        NO_CARRY,
        COLUMNS,
        num_warps=2,
    )
    return found


@triton.jit
def _list_pages(
    contexts,
    block_tables,
    starts,
    last_lengths,
    pages,
    row_count,
    table_width,
    block_tokens,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    others = tl.arange(0, ROWS)
    lengths = tl.load(contexts + others, mask=others < row, other=0)
    start = tl.sum((lengths + block_tokens - 1) // block_tokens, axis=0)
    context = tl.load(contexts + row)
    count = (context + block_tokens - 1) // block_tokens
    tl.store(starts + row + 1, start + count)
    if row == 0:
        tl.store(starts, 0)
    tl.store(last_lengths + row, (context - 1) % block_tokens + 1)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < count
    entries = tl.load(block_tables + row.to(tl.int64) * table_width + columns, mask=inside)
    tl.store(pages + start + columns, entries, mask=inside)


def list_pages(
    context_lengths: Tensor,
    block_tables: Tensor,
    block_tokens: int,
    starts: Tensor,
    last_lengths: Tensor,
    pages: Tensor,
) -> None:
    """Lists the pages of all rows one behind the other, as FlashInfer wants them.

    Args:
        context_lengths: int32 ``[rows]``, at least 1 each.
        block_tables: int32 ``[rows, blocks]``.
        block_tokens: of the pool.
        starts: int32 ``[rows + 1]``: receives where each row's pages begin, and their number.
        last_lengths: int32 ``[rows]``: receives the tokens in each row's last page.
        pages: int32, long enough: receives the pages.
    """
    row_count = len(context_lengths)
    assert block_tables.stride(1) == 1, block_tables.stride()
    _list_pages[(row_count, triton.cdiv(block_tables.shape[1], COLUMNS))](
        context_lengths,
        block_tables,
        starts,
        last_lengths,
        pages,
        row_count,
        block_tables.stride(0),
        block_tokens,
        triton.next_power_of_2(row_count),
        COLUMNS,
        num_warps=2,
    )
