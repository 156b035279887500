"""Drawing the tokens of a step on a GPU: which kernels run for which features, and their memory.

Owns the memory through which the kernels hand on; `sampler` owns the rules. Called by `cuda_step`.

A greedy step runs two kernels; random rows add two, and truncated ones a third, in which greedy
rows end at once. Biases and allowed lists are applied by `sampler.adjusted`, which makes a copy of
the logits in float32: the only steps in which memory is taken while a graph is captured.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from gapless.executor import border_kernel, sampling_kernels
from gapless.executor.sampler import adjusted
from gapless.executor.seats import SeatCopy
from gapless.protos.seats import SCRATCH_SEAT
from gapless.protos.slots import Features, Header

TILE: Final = 4096
"""Tokens of a tile."""
LANES: Final = 1024
WIDTH: Final = 8
"""Threads of a border's program, and the keys that each holds."""


class CudaSampler:
    """Draws for up to `row_max` rows; rows and seats as a slot and the seat copy have them."""

    def __init__(
        self,
        seats: SeatCopy,
        row_max: int,
        vocab_size: int,
        device: torch.device,
        *,
        tile: int = TILE,
        lanes: int = LANES,
    ) -> None:
        self._seats = seats
        self._vocab_size = vocab_size
        self._tile = tile
        self._lanes = lanes
        self._tile_count = triton.cdiv(vocab_size, tile)
        tiles = (row_max, self._tile_count)
        self._tile_best = torch.empty(tiles, dtype=torch.float32, device=device)
        self._tile_tokens = torch.empty(tiles, dtype=torch.int32, device=device)
        self._tile_masses = torch.empty(tiles, dtype=torch.float64, device=device)
        self._tile_ties = torch.empty(tiles, dtype=torch.int32, device=device)
        self._best = torch.empty(row_max, dtype=torch.float32, device=device)
        self._scale = torch.empty(row_max, dtype=torch.float32, device=device)
        self._border = torch.empty(row_max, dtype=torch.int32, device=device)
        self._room = torch.empty(row_max, dtype=torch.int32, device=device)
        self._candidates = torch.empty(row_max, lanes * WIDTH, dtype=torch.int32, device=device)

    def sample(
        self,
        logits: Tensor,
        header: Tensor,
        rows: Tensor,
        features: Features,
        sampled: Tensor,
        faults: Tensor,
    ) -> None:
        """Enqueues the kernels that draw one token a row, as `sampler.sample` does.

        Args:
            logits: ``[row_count, vocab_size]``; rows behind the frame's last are padding.
            header: of the frame's slot, int64.
            rows: of the frame's slot, int32 ``[ROW_COLUMNS, row_max]``.
            features: what any of the rows needs.
            sampled: tokens, int32 ``[row_max]``; written, as many as there are logits.
            faults: see `RowFault`; written likewise.
        """
        assert logits.is_contiguous(), logits.stride()
        assert logits.shape[1] == self._vocab_size, logits.shape
        if features & (Features.BIAS | Features.ALLOWED):
            logits = self._adjusted(logits, header, rows, features)
        table = self._seats.table
        of_rows = (rows, rows.stride(0), table, table.stride(0))
        random = bool(features & Features.RANDOM)
        self._take_best(logits, header, of_rows, random, sampled, faults)
        if random:
            truncated = bool(features & Features.TRUNCATED)
            self._draw(logits, of_rows, truncated, sampled)

    def _take_best(
        self,
        logits: Tensor,
        header: Tensor,
        of_rows: tuple[Tensor, int, Tensor, int],
        random: bool,
        sampled: Tensor,
        faults: Tensor,
    ) -> None:
        """Greedy tokens and faults of all rows, and what the draws of `random` ones start from."""
        sampling_kernels.best_of_tiles[(self._tile_count, len(logits))](
            logits, self._tile_best, self._tile_tokens, self._vocab_size, self._tile
        )
        sampling_kernels.best_of_rows[(len(logits),)](
            header,
            *of_rows,
            self._tile_best,
            self._tile_tokens,
            self._tile_count,
            sampled,
            faults,
            self._best,
            self._scale,
            self._border,
            self._room,
            random,
            triton.next_power_of_2(self._tile_count),
            num_warps=1,
        )

    def _draw(
        self,
        logits: Tensor,
        of_rows: tuple[Tensor, int, Tensor, int],
        truncated: bool,
        sampled: Tensor,
    ) -> None:
        """Replaces the greedy tokens of the rows that draw."""
        row = (logits, self._vocab_size, *of_rows, self._best, self._scale, self._border)
        if truncated:
            border_kernel.borders[(len(logits),)](
                *row,
                self._room,
                self._candidates,
                self._lanes,
                WIDTH,
                num_warps=max(self._lanes // 32, 1),
            )
        sampling_kernels.weights_of_tiles[(self._tile_count, len(logits))](
            *row, self._tile_masses, self._tile_ties, self._tile
        )
        sampling_kernels.draw[(len(logits),)](
            *row,
            self._room,
            self._tile_masses,
            self._tile_ties,
            self._tile_count,
            sampled,
            self._tile,
            triton.next_power_of_2(self._tile_count),
        )

    def _adjusted(self, logits: Tensor, header: Tensor, rows: Tensor, features: Features) -> Tensor:
        """Logits in float32 with biases and lists applied; NaN in the rows that were not finite."""
        row_count = len(logits)
        places = torch.arange(row_count, device=logits.device)
        real = places < header[Header.ROW_COUNT]
        seat_numbers = torch.where(real, rows[0, :row_count], SCRATCH_SEAT).long()
        result, fault = adjusted(logits, seat_numbers, self._seats, features)
        result[:, 0].masked_fill_(fault, torch.nan)
        return result
