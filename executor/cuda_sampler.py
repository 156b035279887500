"""Drawing the tokens of a step on a GPU: which kernels run for which features, and their memory.

Owns the memory through which the kernels hand on; `sampler` owns the rules. Called by `cuda_step`.

A greedy step runs two kernels; random rows add two, and truncated ones six more, in which greedy
rows end at once. Biases and allowed lists are applied by `sampler.adjusted`, which makes a copy of
the logits in float32: the only steps in which memory is taken while a graph is captured.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from gapless.executor import border_kernel, sampling_kernels, split_kernel
from gapless.executor.sampler import adjusted
from gapless.executor.seats import SeatCopy
from gapless.protos.seats import SCRATCH_SEAT
from gapless.protos.slots import Features, Header

TILE: Final = 4096
"""Tokens of a tile."""
SAMPLE: Final = 4096
"""Tokens from which a border is guessed."""
ROUNDS: Final = 3
"""Guesses of a border, before a row in which all missed is searched wherever it can be.

Top-p behind top-k needs two, and a row like a real vocabulary's misses every second first one.
"""


def tile_places(vocab_size: int, tile: int) -> int:
    """Places for sums of tiles: a power of two, and more than one, as Triton wants it."""
    places: int = triton.next_power_of_2(triton.cdiv(vocab_size, tile))
    return max(2, places)


def sample_size(vocab_size: int, sample: int) -> int:
    """Tokens of a row's sample, a power of two: at most `sample`, and at most the row."""
    row: int = triton.next_power_of_2(vocab_size // 2 + 1)
    return min(sample, row)


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
        sample: int = SAMPLE,
        rounds: int = ROUNDS,
    ) -> None:
        self._seats = seats
        self._vocab_size = vocab_size
        self._tile = tile
        self._sample = sample_size(vocab_size, sample)
        self._rounds = rounds
        self._tile_count = triton.cdiv(vocab_size, tile)
        self._tiles = tile_places(vocab_size, tile)
        tiles = (row_max, self._tile_count)
        self._tile_best = torch.empty(tiles, dtype=torch.float32, device=device)
        self._tile_tokens = torch.empty(tiles, dtype=torch.int32, device=device)
        self._best = torch.empty(row_max, dtype=torch.float32, device=device)
        self._scale = torch.empty(row_max, dtype=torch.float32, device=device)
        words = sampling_kernels.STATE_WORDS.value
        self._states = torch.zeros(row_max, words, dtype=torch.int32, device=device)
        self._kept_masses = torch.empty(row_max, dtype=torch.float64, device=device)
        # Zero in the tiles behind the last.
        self._masses = torch.zeros(row_max, 2, self._tiles, dtype=torch.float64, device=device)
        self._counts = torch.zeros(row_max, 3, self._tiles, dtype=torch.int32, device=device)
        self._candidates = torch.empty(
            row_max, self._tile_count * tile, dtype=torch.float32, device=device
        )

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
            self._states,
            random,
            self._tiles,
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
        row_count = len(logits)
        row = (logits, self._vocab_size, *of_rows, self._best, self._scale, self._states)
        if truncated:
            self._find_borders(row, row_count)
        else:
            sampling_kernels.weights_of_tiles[(self._tile_count, row_count)](
                logits,
                self._vocab_size,
                self._best,
                self._scale,
                self._masses,
                self._tile,
                self._tiles,
            )
        sampling_kernels.draw[(row_count,)](
            *row, self._masses, self._counts, sampled, self._tile, self._tiles
        )

    def _find_borders(self, row: tuple[Tensor | int, ...], row_count: int) -> None:
        """Borders of all rows, and the weights of tiles below them."""
        split_kernel.propose[(row_count,)](*row, self._kept_masses, self._sample, num_warps=16)
        parts = (self._masses, self._counts, self._candidates)
        for number in range(self._rounds):
            split_kernel.split_tiles[(self._tile_count, row_count)](
                row[0], row[1], *row[-3:], *parts, self._tile, self._tiles
            )
            border_kernel.find_borders[(row_count,)](
                *row,
                self._kept_masses,
                *parts,
                number == self._rounds - 1,
                self._sample,
                self._tile,
                self._tiles,
                num_warps=16,
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
