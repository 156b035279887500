"""The first kernels of a step against numpy, over frames with padding, carry-over and old rows.

On a GPU where there is one; in Triton's interpreter elsewhere.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from gapless.executor import step_kernels
from gapless.executor.seats import SeatCopy
from gapless.protos.seats import SCRATCH_SEAT, SeatLayout
from gapless.protos.slots import HEADER_WORDS, NO_CARRY, ROW_COLUMNS, Header

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_TOKENS = 16
ROW_MAX = 24
MARKER = -(1 << 30)
"""What no kernel may read: as an index it would be far outside."""


def seat_copy(layout: SeatLayout, draw: np.random.Generator) -> tuple[SeatCopy, np.ndarray]:
    table = draw.integers(0, 500, (layout.seat_count, layout.words), dtype=np.int32)
    seats = SeatCopy(layout, torch.device(DEVICE))
    seats.upload(table)
    return seats, table


def header(**words: int) -> torch.Tensor:
    found = torch.full((HEADER_WORDS,), MARKER, dtype=torch.int64)
    for name, value in words.items():
        found[Header[name]] = value
    return found.to(DEVICE)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 300])
def test_assignments_are_applied_as_many_as_there_are(count: int) -> None:
    draw = np.random.default_rng(count)
    layout = SeatLayout(seat_count=9, block_max=64)
    seats, table = seat_copy(layout, draw)
    places = draw.permutation(layout.seat_count * layout.words)[:300]
    given = np.stack([*np.divmod(places, layout.words), draw.integers(0, 99, 300)], axis=1)
    given[count:] = MARKER
    on_device = torch.from_numpy(given.astype(np.int32)).to(DEVICE)
    step_kernels.apply_assignments(header(ASSIGNMENT_COUNT=count), on_device, seats, 300)
    for seat, word, value in given[:count]:
        table[seat, word] = value
    assert np.array_equal(seats.table.cpu().numpy(), table)


@pytest.mark.parametrize(
    ("lengths", "row_count", "token_count"),
    [
        ([], 1, 1),
        ([1], 1, 1),
        ([1, 1, 1], 4, 4),
        ([1] * 24, 24, 24),
        ([5, 1, 300, 1], 4, 307),
        ([5, 1, 300, 1], 24, 512),
        ([600], 24, 1024),
    ],
)
@pytest.mark.parametrize("context_max", [1024, 16_384])
def test_rows_are_read_and_carried_over(
    lengths: list[int], row_count: int, token_count: int, context_max: int
) -> None:
    draw = np.random.default_rng(len(lengths))
    layout = SeatLayout(ROW_MAX + 1, context_max // BLOCK_TOKENS)
    seats, table = seat_copy(layout, draw)
    rows = np.full((ROW_COLUMNS, ROW_MAX), MARKER, np.int32)
    tokens = np.full((1024, 2), MARKER, np.int32)
    previous = np.full(ROW_MAX, MARKER, np.int32)
    real, used = len(lengths), sum(lengths)
    length = np.array(lengths, np.int64)
    start, end = length.cumsum() - length, length.cumsum()
    seat = np.full(row_count, SCRATCH_SEAT)
    seat[:real] = draw.permutation(ROW_MAX)[:real] + 1
    context = np.ones(row_count, np.int64)
    context[:real] = length + draw.integers(0, context_max + 1 - length)
    token = np.zeros(token_count, np.int64)
    token[:used] = draw.integers(0, 1000, used)
    token_row = np.zeros(token_count, np.int64)
    token_row[:used] = np.repeat(np.arange(real), length)
    position = np.zeros(token_count, np.int64)
    for row in range(real):
        position[start[row] : end[row]] = np.arange(context[row] - length[row], context[row])
    rows[0, :real], rows[2, :real], rows[3, :real] = seat[:real], start, length
    rows[4, :real] = context[:real]
    tokens[:used, 0], tokens[:used, 1] = token[:used], position[:used]
    for row in range(real):
        if row % 3 == 1:  # literal: nothing of the step before may be read for it
            rows[1, row] = NO_CARRY
        else:
            rows[1, row] = (row * 7) % ROW_MAX
            previous[rows[1, row]] = token[start[row]]
            tokens[start[row], 0] = MARKER
    found = step_kernels.read_rows(
        header(ROW_COUNT=real, TOKEN_COUNT=used),
        torch.from_numpy(rows).to(DEVICE),
        torch.from_numpy(tokens).to(DEVICE),
        torch.from_numpy(previous).to(DEVICE),
        seats,
        row_count,
        token_count,
        BLOCK_TOKENS,
    )
    tables = table[seat, layout.blocks_at : layout.blocks_at + layout.block_max]
    rows_of = np.where(np.arange(token_count) < used, seat[token_row], SCRATCH_SEAT)
    blocks = table[rows_of, layout.blocks_at + position // BLOCK_TOKENS].astype(np.int64)
    ends = np.full(row_count, used)
    ends[:real] = end
    expected = {
        "token_ids": token,
        "positions": position,
        "write_slots": blocks * BLOCK_TOKENS + position % BLOCK_TOKENS,
        "token_rows": token_row,
        "query_starts": np.concatenate([[0], ends]),
        "last_tokens": np.where(np.arange(row_count) < real, ends - 1, 0),
        "context_lengths": context,
        "block_tables": tables,
    }
    for name, values in expected.items():
        assert np.array_equal(getattr(found, name).cpu().numpy(), values), name


@pytest.mark.parametrize("row_count", [1, 3, 64, 200])
def test_pages_are_listed_without_gaps(row_count: int) -> None:
    draw = np.random.default_rng(row_count)
    contexts = draw.integers(1, 700 * BLOCK_TOKENS, row_count).astype(np.int32)
    counts = -(-contexts // BLOCK_TOKENS)
    tables = draw.integers(0, 1 << 20, (row_count, 700), dtype=np.int32)
    starts = torch.full((row_count + 1,), MARKER, dtype=torch.int32, device=DEVICE)
    last_lengths = torch.full((row_count,), MARKER, dtype=torch.int32, device=DEVICE)
    pages = torch.full((int(counts.sum()) + 1,), MARKER, dtype=torch.int32, device=DEVICE)
    step_kernels.list_pages(
        torch.from_numpy(contexts).to(DEVICE),
        torch.from_numpy(tables).to(DEVICE),
        BLOCK_TOKENS,
        starts,
        last_lengths,
        pages,
    )
    listed = [tables[row, :count] for row, count in enumerate(counts)]
    assert np.array_equal(starts.cpu().numpy(), np.concatenate([[0], counts.cumsum()]))
    assert np.array_equal(last_lengths.cpu().numpy(), (contexts - 1) % BLOCK_TOKENS + 1)
    assert np.array_equal(pages.cpu().numpy(), np.concatenate([*listed, [MARKER]]))
