"""Draws by the kernels and by the torch sampler side by side, on any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from gapless.executor.cuda_sampler import ROUNDS, SAMPLE, TILE, CudaSampler
from gapless.executor.sampler import SampleRows, sample
from gapless.executor.seats import SeatCopy
from gapless.protos.sampling import Sampling
from gapless.protos.seats import SeatLayout
from gapless.protos.slots import HEADER_WORDS, ROW_COLUMNS, Features, Header
from tests.executor.steps import seat_words

EVERYTHING = Features.RANDOM | Features.TRUNCATED | Features.BIAS | Features.ALLOWED
UNTOUCHED = -7


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """What the rows of a step got."""

    tokens: list[int]
    faults: list[int]


class Table:
    """Sequences on seats, row r on seat 1 + r, and both ways to draw for them."""

    def __init__(
        self,
        samplings: Sequence[Sampling],
        vocab_size: int,
        device: torch.device,
        *,
        tile: int = TILE,
        sample: int = SAMPLE,
        rounds: int = ROUNDS,
    ) -> None:
        self.row_count = len(samplings)
        self._row_max = self.row_count + 3
        self._device = device
        self._seats = SeatCopy(SeatLayout(seat_count=1 + self._row_max, block_max=1), device)
        for index, sampling in enumerate(samplings):
            self._seats.apply(seat_words(self._seats.layout, 1 + index, [1], sampling))
        self._sampler = CudaSampler(
            self._seats,
            self._row_max,
            vocab_size,
            device,
            tile=tile,
            sample=sample,
            rounds=rounds,
        )
        self._header = torch.zeros(HEADER_WORDS, dtype=torch.int64, device=device)
        self._header[Header.ROW_COUNT] = self.row_count
        self.rows = torch.zeros(ROW_COLUMNS, self._row_max, dtype=torch.int32, device=device)
        self.rows[0, : self.row_count] = torch.arange(1, 1 + self.row_count)
        self.rows[5, : self.row_count] = 1
        self.sampled = torch.zeros(self._row_max, dtype=torch.int32, device=device)
        self.faults = torch.zeros_like(self.sampled)

    def place(self, positions: Sequence[int]) -> None:
        """Sets the positions of the tokens to be drawn."""
        self.rows[4, : self.row_count] = torch.tensor(positions, dtype=torch.int32)

    def enqueue(self, logits: Tensor, features: Features) -> None:
        """Draws by the kernels into `sampled` and `faults`."""
        self._sampler.sample(logits, self._header, self.rows, features, self.sampled, self.faults)

    def by_kernels(self, logits: Tensor, features: Features) -> Drawn:
        """As `enqueue`; `logits` may have rows more than there are, which are padding."""
        self.sampled.fill_(UNTOUCHED)
        self.faults.fill_(UNTOUCHED)
        self.enqueue(logits, features)
        behind = slice(len(logits), None)
        assert (self.sampled[behind] == UNTOUCHED).all(), "wrote behind the last row"
        assert (self.faults[behind] == UNTOUCHED).all(), "wrote behind the last row"
        padding = slice(self.row_count, len(logits))
        assert (self.faults[padding] == 0).all(), "padding has a fault"
        assert ((self.sampled[padding] >= 0) & (self.sampled[padding] < logits.shape[1])).all()
        return Drawn(
            self.sampled[: self.row_count].tolist(), self.faults[: self.row_count].tolist()
        )

    def by_torch(self, logits: Tensor, features: Features) -> Drawn:
        """As the torch sampler draws."""
        rows = self.rows[:, : self.row_count].long()
        tokens, faults = sample(
            logits[: self.row_count], SampleRows(rows[0], rows[4], rows[5]), self._seats, features
        )
        return Drawn(tokens.tolist(), faults.tolist())
