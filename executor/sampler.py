"""Choosing the next tokens: logits and the seats' parameters in, one token a row out.

Owns the rules of `protos.sampling.Sampling` as batched tensor operations. Each row has its own
parameters and is computed from its own logits alone, so a token does not depend on the row's
neighbours. Has no state: randomness comes from (seed, position). Called by the step.

Nothing here waits for the device or depends on its values; the frame's features alone decide
which parts are left out, and a part left out would not have changed any row.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
from torch import Tensor

from gapless.executor.random_stream import uniforms
from gapless.executor.seats import SeatCopy
from gapless.protos.slots import Features, RowFault

GREEDY_TEMPERATURE: Final = 1e-5
"""Temperatures below this are greedy: divided by them, float32 logits are all rounding errors."""
LOG2_E: Final = 1.4426950408889634
"""Weights are powers of two, which cost less than powers of e; so logits are scaled by this."""


@dataclasses.dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows to sample for, int64 ``[rows]`` each, on the device."""

    seats: Tensor
    positions: Tensor
    """Position of the token to be drawn: the row's context length."""
    result_counts: Tensor
    """0: nobody wants the row's token, and it has no fault."""


def sample(
    logits: Tensor, rows: SampleRows, seats: SeatCopy, features: Features
) -> tuple[Tensor, Tensor]:
    """Draws one token a row.

    Args:
        logits: ``[rows, vocab_size]``, any floating type; computed with in float32.
        rows: whose they are.
        seats: the parameters.
        features: what any of the rows needs; more than needed is harmless.

    Returns:
        Tokens and faults (see `RowFault`), int32 ``[rows]``. Tokens are valid ids even where they
        mean nothing.
    """
    logits, fault = adjusted(logits, rows.seats, seats, features)
    tokens = _greatest(logits)
    best = logits.gather(-1, tokens[:, None])
    fault |= ~best.view(-1).isfinite()
    if features & Features.RANDOM:
        temperature = seats.temperature(rows.seats)
        greedy = temperature < GREEDY_TEMPERATURE
        scale = LOG2_E / torch.where(greedy, 1.0, temperature)
        tempered = (logits - best) * scale[:, None]
        weights = tempered.exp2()
        if features & Features.TRUNCATED:
            weights = torch.where(_kept(tempered, weights, rows.seats, seats), weights, 0.0)
        drawn = inverted(weights, uniforms(seats.seed(rows.seats), rows.positions))
        # Sums rounded in another order might pick a neighbour of weight 0: then take the best.
        possible = weights.gather(-1, drawn[:, None]).view(-1) > 0
        tokens = torch.where(greedy | ~possible, tokens, drawn)
    faults = torch.where(fault & (rows.result_counts > 0), RowFault.NOT_FINITE, RowFault.NONE)
    return tokens.to(torch.int32), faults.to(torch.int32)


def adjusted(
    logits: Tensor, seat_numbers: Tensor, seats: SeatCopy, features: Features
) -> tuple[Tensor, Tensor]:
    """Logits in float32 with biases and allowed lists applied, and which rows were not finite.

    A row is finite if its greatest logit is; float32 ``[rows, vocab_size]`` and bool ``[rows]``.
    """
    logits = logits.float()
    fault = ~logits.amax(dim=-1).isfinite()
    if features & Features.BIAS:
        logits = _biased(logits, *seats.bias(seat_numbers))
    if features & Features.ALLOWED:
        logits = _only_allowed(logits, *seats.allowed(seat_numbers))
    return logits, fault


def _biased(logits: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """Adds ``values[r, e]`` to the logit of ``tokens[r, e]``; unused entries are (0, 0.0)."""
    return logits.scatter_add(-1, tokens, values)


def _only_allowed(logits: Tensor, tokens: Tensor, used: Tensor) -> Tensor:
    """Minus infinity outside a row's list; a row without a list keeps all."""
    row_count, vocab_size = logits.shape
    # Unused entries go to a column of their own, behind the vocabulary.
    allowed = torch.zeros(row_count, vocab_size + 1, dtype=torch.bool, device=logits.device)
    allowed.scatter_(-1, torch.where(used, tokens, vocab_size), value=True)
    listless = ~used[:, :1]
    return logits.masked_fill(~(allowed[:, :vocab_size] | listless), -torch.inf)


def _kept(tempered: Tensor, weights: Tensor, rows: Tensor, seats: SeatCopy) -> Tensor:
    """Which tokens top-k, then top-p of what it left, and min-p keep; bool ``[rows, vocab_size]``.

    `tempered` are logits less the best one, divided by temperature, in units of log 2; `weights`
    their powers of two, so that the best has weight 1. Among equal tokens at a border, those of
    lower ids are kept.
    """
    vocab_size = tempered.shape[-1]
    top_k, top_p = seats.top_k(rows)[:, None], seats.top_p(rows)[:, None].double()
    rank_limit = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long()

    falling = _falling(tempered)
    sums = falling.exp2().cumsum(dim=-1, dtype=torch.float64)
    mass = sums.gather(-1, rank_limit - 1)
    reached = torch.where(top_p < 1.0, top_p * mass, torch.inf)
    # A token belongs to the set if those before it have not reached the mass.
    wanted = 1 + (sums < reached).sum(dim=-1, keepdim=True)
    kept_count = torch.minimum(wanted, rank_limit)

    border = falling.gather(-1, kept_count - 1)
    above = tempered > border
    at_border = tempered == border
    room = kept_count - above.sum(dim=-1, keepdim=True)
    within = above | (at_border & (at_border.cumsum(dim=-1, dtype=torch.int32) <= room))
    return within & (weights >= seats.min_p(rows)[:, None])


def _greatest(values: Tensor) -> Tensor:
    """Where the greatest value of each row is, int64 ``[rows]``; of equal ones the first."""
    if values.device.type == "cpu":  # numpy takes a twentieth of torch's time
        return torch.from_numpy(values.numpy().argmax(axis=-1))
    return values.argmax(dim=-1)


def _falling(values: Tensor) -> Tensor:
    """`values` in descending order along the last dimension."""
    if values.device.type == "cpu":  # numpy's vectorised sort takes a third of torch's time
        rising = values.numpy().copy()
        rising.sort(axis=-1)
        return torch.from_numpy(rising).flip(-1)
    return values.sort(dim=-1, descending=True).values


def inverted(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the cumulative weights in order of token id.

    Args:
        weights: float32 ``[rows, vocab_size]``, not negative, of any sum.
        uniform: float64 ``[rows]`` in [0, 1).

    Returns:
        int64 ``[rows]``: the first token at which the sum of weights exceeds its share `uniform`.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    target = uniform[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, target, right=True)
    return found.view(-1).clamp(max=weights.shape[-1] - 1)
