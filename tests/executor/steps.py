"""Hand-made frames and seat tables for tests of the numerical half."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from gapless.executor.arenas import PlainArenas
from gapless.executor.cpu_start import cpu_decoder
from gapless.executor.kv import KvPool
from gapless.executor.model import Model
from gapless.executor.seats import SeatCopy
from gapless.executor.step import StepRunner
from gapless.protos.messages import Epoch, StepNumber
from gapless.protos.sampling import Sampling
from gapless.protos.seats import Int32s, SeatLayout
from gapless.protos.slots import NO_CARRY, Features, Frame, Rows

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row to be put into a frame."""

    seat: int
    token_ids: Sequence[int]
    start: int
    """Position of the first of the tokens."""
    carry_row: int = NO_CARRY
    result_count: int = 1


def make_frame(
    rows: Sequence[Row],
    *,
    step: int = 0,
    assignments: Int32s | None = None,
    features: Features = Features.NONE,
) -> Frame:
    """A checked frame of `rows`."""
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int32)
    starts = np.array([row.start for row in rows], dtype=np.int32)
    frame = Frame(
        epoch=Epoch(1),
        step=StepNumber(step),
        rows=Rows(
            seat=np.array([row.seat for row in rows], dtype=np.int32),
            carry_row=np.array([row.carry_row for row in rows], dtype=np.int32),
            query_start=(np.cumsum(lengths) - lengths).astype(np.int32),
            query_length=lengths,
            context_length=starts + lengths,
            result_count=np.array([row.result_count for row in rows], dtype=np.int32),
        ),
        token_ids=np.concatenate([np.array(row.token_ids, dtype=np.int32) for row in rows]),
        positions=np.concatenate(
            [row.start + np.arange(len(row.token_ids), dtype=np.int32) for row in rows]
        ),
        assignments=np.zeros((0, 3), dtype=np.int32) if assignments is None else assignments,
        features=features,
        published_ns=0,
    )
    frame.check()
    return frame


def seat_words(layout: SeatLayout, seat: int, blocks: Sequence[int], sampling: Sampling) -> Int32s:
    """Assignments that give `seat` its blocks and parameters, int32 ``[n, 3]``."""
    words, values = layout.sampling_words(sampling)
    block_words = layout.blocks_at + np.arange(len(blocks), dtype=np.int32)
    words = np.concatenate([words, block_words])
    values = np.concatenate([values, np.array(blocks, dtype=np.int32)])
    return np.stack([np.full_like(words, seat), words, values], axis=1).astype(np.int32)


def make_runner(
    folder: Path,
    *,
    dtype: torch.dtype,
    block_count: int,
    block_tokens: int,
    row_max: int,
    block_max: int,
) -> StepRunner:
    """A runner over a freshly loaded model, as served, with every cell of the pool poisoned."""
    arenas = PlainArenas(CPU)
    model = Model.load(folder, dtype, CPU, arenas)
    pool = KvPool(arenas, model.shape.kv_shape(block_tokens), block_count)
    pool.tensor.fill_(torch.nan)
    seats = SeatCopy(SeatLayout(seat_count=row_max + 1, block_max=block_max), CPU)
    return StepRunner(model, pool, seats, row_max, cpu_decoder(model, block_tokens))
