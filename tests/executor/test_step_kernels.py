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


@pytest.mark.parametrize(("row_count", "bucket"), [(0, 1), (1, 1), (3, 4), (5, 8), (24, 24)])
@pytest.mark.parametrize("context_max", [64, 16_384])
def test_rows_are_read_and_carried_over(row_count: int, bucket: int, context_max: int) -> None:
    draw = np.random.default_rng(row_count)
    layout = SeatLayout(ROW_MAX + 1, context_max // BLOCK_TOKENS)
    seats, table = seat_copy(layout, draw)
    rows = np.full((ROW_COLUMNS, ROW_MAX), MARKER, np.int32)
    tokens = np.full((ROW_MAX, 2), MARKER, np.int32)
    previous = np.full(ROW_MAX, MARKER, np.int32)
    seat = np.zeros(bucket, np.int64) + SCRATCH_SEAT
    seat[:row_count] = draw.permutation(ROW_MAX)[:row_count] + 1
    context = np.ones(bucket, np.int64)
    context[:row_count] = draw.integers(1, context_max + 1, row_count)
    position = context - 1
    token = np.zeros(bucket, np.int64)
    token[:row_count] = draw.integers(0, 1000, row_count)
    rows[0, :row_count], rows[4, :row_count] = seat[:row_count], context[:row_count]
    tokens[:row_count, 1] = position[:row_count]
    for row in range(row_count):
        if row % 3 == 1:  # literal: nothing of the step before may be read for it
            rows[1, row], tokens[row, 0] = NO_CARRY, token[row]
        else:
            source = (row * 7) % ROW_MAX
            rows[1, row] = source
            previous[source] = token[row]
    found = step_kernels.decode_rows(
        header(ROW_COUNT=row_count),
        torch.from_numpy(rows).to(DEVICE),
        torch.from_numpy(tokens).to(DEVICE),
        torch.from_numpy(previous).to(DEVICE),
        seats,
        bucket,
        BLOCK_TOKENS,
    )
    tables = table[seat, layout.blocks_at : layout.blocks_at + layout.block_max]
    write_slots = tables[np.arange(bucket), position // BLOCK_TOKENS].astype(np.int64)
    write_slots = write_slots * BLOCK_TOKENS + position % BLOCK_TOKENS
    assert np.array_equal(found.token_ids.cpu().numpy(), token)
    assert np.array_equal(found.positions.cpu().numpy(), position)
    assert np.array_equal(found.context_lengths.cpu().numpy(), context)
    assert np.array_equal(found.block_tables.cpu().numpy(), tables)
    assert np.array_equal(found.write_slots.cpu().numpy(), write_slots)


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
