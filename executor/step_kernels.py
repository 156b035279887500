"""From a frame on the device to what the model's kernels read: a step's first kernels, in Triton.

Owns the reading of a slot's rows by the GPU itself, with carry-over: a captured step learns from
the slot alone which rows it has, which seats they have and where their input comes from. Knows
the layout of `protos.slots` and of the seat table, and nothing of models. Called by the CUDA step
and by the attention that wants its pages listed.

A step may be read into more rows and tokens than it has. Rows behind its last have no token and
the scratch seat; tokens behind its last belong to no row and write to the scratch block.
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
TOKENS_A_PROGRAM: Final = 256
COLUMNS: Final = 256
"""Entries of a block table that a program copies."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRows:
    """A step's tokens, those of each row together, carried over where the frame says so."""

    token_ids: Tensor
    """int64 ``[tokens]``, as are positions, write_slots and token_rows."""
    positions: Tensor
    write_slots: Tensor
    """Places in the pool."""
    token_rows: Tensor
    query_starts: Tensor
    """int32 ``[rows + 1]``: where each row's tokens begin; the last one: how many there are."""
    last_tokens: Tensor
    """int64 ``[rows]``."""
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
def _read_rows(
    header,
    rows,
    row_max,
    table,
    words,
    blocks_at,
    query_starts,
    last_tokens,
    contexts,
    block_tables,
    block_max,
    ROW_COUNT: tl.constexpr,
    TOKEN_COUNT: tl.constexpr,
    SCRATCH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    real = row < tl.load(header + ROW_COUNT)
    seat = tl.load(rows + row, mask=real, other=SCRATCH).to(tl.int64)
    start = tl.load(rows + 2 * row_max + row, mask=real, other=0)
    length = tl.load(rows + 3 * row_max + row, mask=real, other=0)
    end = tl.where(real, start + length, tl.load(header + TOKEN_COUNT).to(tl.int32))
    if row == 0:
        tl.store(query_starts, 0)
    tl.store(query_starts + row + 1, end)
    tl.store(last_tokens + row, tl.where(real, end - 1, 0).to(tl.int64))
    tl.store(contexts + row, tl.load(rows + 4 * row_max + row, mask=real, other=1))
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < block_max
    entries = tl.load(table + seat * words + blocks_at + columns, mask=inside, other=0)
    tl.store(block_tables + row.to(tl.int64) * block_max + columns, entries, mask=inside)


@triton.jit
def _read_tokens(
    header,
    rows,
    row_max,
    table,
    words,
    blocks_at,
    tokens,
    previous,
    token_ids,
    positions,
    write_slots,
    token_rows,
    block_tokens,
    token_count,
    ROW_COUNT: tl.constexpr,
    TOKEN_COUNT: tl.constexpr,
    SCRATCH: tl.constexpr,
    NO_CARRY: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program for some tokens of a row; behind the rows, one for those of the padding."""
    row = tl.program_id(0)
    real = row < tl.load(header + ROW_COUNT)
    used = tl.load(header + TOKEN_COUNT).to(tl.int32)
    is_padding = row == tl.num_programs(0) - 1
    seat = tl.load(rows + row, mask=real, other=SCRATCH).to(tl.int64)
    carry = tl.load(rows + row_max + row, mask=real, other=NO_CARRY)
    start = tl.load(rows + 2 * row_max + row, mask=real, other=used)
    length = tl.load(rows + 3 * row_max + row, mask=real, other=0)
    length = tl.where(is_padding, token_count - used, length)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lanes < length
    places = start + lanes
    given = inside & real
    is_carried = given & (lanes == 0) & (carry >= 0)
    token = tl.load(tokens + 2 * places, mask=given & ~is_carried, other=0)
    token = tl.where(is_carried, tl.load(previous + carry + 0 * lanes, mask=is_carried), token)
    position = tl.load(tokens + 2 * places + 1, mask=given, other=0)
    block = tl.load(table + seat * words + blocks_at + position // block_tokens, mask=inside)
    slot = block.to(tl.int64) * block_tokens + position % block_tokens
    tl.store(token_ids + places, token.to(tl.int64), mask=inside)
    tl.store(positions + places, position.to(tl.int64), mask=inside)
    tl.store(write_slots + places, slot, mask=inside)
    tl.store(token_rows + places, tl.where(real, row, 0).to(tl.int64) + 0 * lanes, mask=inside)


def _empty(row_count: int, token_count: int, block_max: int, device: torch.device) -> PackedRows:
    of_tokens = torch.empty(4, token_count, dtype=torch.int64, device=device)
    return PackedRows(
        of_tokens[0],
        of_tokens[1],
        of_tokens[2],
        of_tokens[3],
        torch.empty(row_count + 1, dtype=torch.int32, device=device),
        torch.empty(row_count, dtype=torch.int64, device=device),
        torch.empty(row_count, dtype=torch.int32, device=device),
        torch.empty(row_count, block_max, dtype=torch.int32, device=device),
    )


def read_rows(
    header: Tensor,
    rows: Tensor,
    tokens: Tensor,
    previous: Tensor,
    seats: SeatCopy,
    row_count: int,
    token_count: int,
    block_tokens: int,
) -> PackedRows:
    """Reads the rows of a step, and carries tokens over.

    Args:
        header: int64 words of the slot.
        rows: int32 ``[ROW_COLUMNS, row_max]``, see `protos.slots.Rows`.
        tokens: int32 pairs (token id, position), ``[token_max, 2]``.
        previous: int32 ``[row_max]``, what the step before sampled.
        seats: whose block tables to take.
        row_count: rows of the result, at least those of the frame.
        token_count: tokens of the result, likewise.
        block_tokens: of the pool.
    """
    layout = seats.layout
    found = _empty(row_count, token_count, layout.block_max, rows.device)
    source = (header, rows, rows.shape[1], seats.table, layout.words, layout.blocks_at)
    counts = int(Header.ROW_COUNT), int(Header.TOKEN_COUNT), SCRATCH_SEAT
    _read_rows[(row_count, triton.cdiv(layout.block_max, COLUMNS))](
        *source,
        found.query_starts,
        found.last_tokens,
        found.context_lengths,
        found.block_tables,
        layout.block_max,
        *counts,
        COLUMNS,
        num_warps=2,
    )
    _read_tokens[(row_count + 1, triton.cdiv(token_count, TOKENS_A_PROGRAM))](
        *source,
        tokens,
        previous,
        found.token_ids,
        found.positions,
        found.write_slots,
        found.token_rows,
        block_tokens,
        token_count,
        *counts,
        NO_CARRY,
        TOKENS_A_PROGRAM,
        num_warps=4,
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
