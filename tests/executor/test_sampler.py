"""The sampler draws from the stated distribution, each row for itself."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from gapless.executor.sampler import SampleRows, inverted, sample
from gapless.executor.seats import SeatCopy
from gapless.protos.sampling import Sampling
from gapless.protos.seats import SeatLayout
from gapless.protos.slots import Features, RowFault
from tests.executor.steps import CPU, seat_words

torch.set_num_threads(1)
VOCAB_SIZE = 40
LAYOUT = SeatLayout(seat_count=40, block_max=4)
EVERYTHING = Features.RANDOM | Features.TRUNCATED | Features.BIAS | Features.ALLOWED
INFINITY = math.inf


def seats_of(*samplings: Sampling) -> SeatCopy:
    """Seat 1 + i has parameters i."""
    seats = SeatCopy(LAYOUT, CPU)
    for index, sampling in enumerate(samplings):
        seats.apply(seat_words(LAYOUT, 1 + index, [1], sampling))
    return seats


def rows_of(
    seats: list[int], positions: list[int], result_counts: list[int] | None = None
) -> SampleRows:
    return SampleRows(
        torch.tensor(seats),
        torch.tensor(positions),
        torch.tensor(result_counts if result_counts is not None else [1] * len(seats)),
    )


def features_of(sampling: Sampling) -> Features:
    features = Features.RANDOM if sampling.temperature > 0 else Features.NONE
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        features |= Features.TRUNCATED
    if sampling.bias_tokens:
        features |= Features.BIAS
    if sampling.allowed_tokens:
        features |= Features.ALLOWED
    return features


def some_logits(seed: int, rows: int = 1, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def exact_distribution(logits: Tensor, sampling: Sampling) -> list[float]:
    """The distribution of `Sampling`'s docstring, token by token in plain Python."""
    values = [float(value) for value in logits]
    for token, bias in zip(sampling.bias_tokens, sampling.bias_values, strict=True):
        values[token] += bias
    if sampling.allowed_tokens:
        allowed = set(sampling.allowed_tokens)
        values = [v if t in allowed else -INFINITY for t, v in enumerate(values)]
    best = max(values)
    weights = [math.exp((value - best) / sampling.temperature) for value in values]
    order = sorted(range(len(values)), key=lambda token: (-weights[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    mass = sum(weights[token] for token in order)
    kept: list[int] = []
    reached = 0.0
    for token in order:
        if sampling.top_p < 1 and kept and reached >= sampling.top_p * mass:
            break
        kept.append(token)
        reached += weights[token]
    kept = [token for token in kept if weights[token] >= sampling.min_p]
    total = sum(weights[token] for token in kept)
    return [weights[t] / total if t in set(kept) else 0.0 for t in range(len(values))]


def chi_square_probability(counts: list[int], distribution: list[float]) -> float:
    """How likely draws from `distribution` are at least this far from it; rare tokens pooled."""
    draws = sum(counts)
    expected = [draws * share for share in distribution]
    rare = [token for token, value in enumerate(expected) if value < 8]
    bins = [(counts[t], expected[t]) for t in range(len(counts)) if t not in set(rare)]
    pooled = sum(expected[token] for token in rare)
    if pooled > 0:
        bins.append((sum(counts[token] for token in rare), pooled))
    statistic = sum((count - value) ** 2 / value for count, value in bins)
    if len(bins) == 1:
        return 1.0
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


DISTRIBUTIONS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.4),
    "hot": Sampling(temperature=2.0),
    "top-k": Sampling(top_k=5),
    "top-k 1": Sampling(top_k=1),
    "top-k of all": Sampling(top_k=VOCAB_SIZE),
    "top-p": Sampling(top_p=0.8),
    "top-p low": Sampling(top_p=0.3, temperature=1.5),
    "top-p tiny": Sampling(top_p=1e-6),
    "min-p": Sampling(min_p=0.1),
    "min-p of the best": Sampling(min_p=1.0),
    "bias": Sampling(bias_tokens=(3, 7, 11), bias_values=(5.0, -3.0, -INFINITY)),
    "allowed": Sampling(allowed_tokens=(1, 2, 30, 39)),
    "combined": Sampling(
        temperature=1.3,
        top_k=12,
        top_p=0.9,
        min_p=0.05,
        bias_tokens=(3, 7),
        bias_values=(4.0, -INFINITY),
        allowed_tokens=(*range(0, 40, 2), 3, 7),
    ),
}


@pytest.mark.parametrize("seed", [0, 20261129, 2**64 - 1])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_follow_the_exact_distribution(name: str, seed: int) -> None:
    sampling = msgspec.structs.replace(DISTRIBUTIONS[name], seed=seed)
    logits = some_logits(seed=7)
    draws = 3_000 if sampling.bias_tokens or sampling.allowed_tokens else 20_000  # lists are wide
    rows = rows_of([1] * draws, list(range(draws)))
    tokens, faults = sample(
        logits.expand(draws, -1), rows, seats_of(sampling), features_of(sampling)
    )
    assert not faults.any()
    counts = torch.bincount(tokens, minlength=VOCAB_SIZE).tolist()
    distribution = exact_distribution(logits[0], sampling)
    impossible = [t for t in range(VOCAB_SIZE) if distribution[t] == 0 and counts[t]]
    assert not impossible, impossible
    assert chi_square_probability(counts, distribution) > 1e-4


def test_the_chi_square_test_can_fail() -> None:
    logits = some_logits(seed=7)
    rows = rows_of([1] * 20_000, list(range(20_000)))
    tokens, _ = sample(
        logits.expand(20_000, -1),
        rows,
        seats_of(Sampling(temperature=1.05)),
        Features.RANDOM,
    )
    counts = torch.bincount(tokens, minlength=VOCAB_SIZE).tolist()
    assert chi_square_probability(counts, exact_distribution(logits[0], Sampling())) < 1e-4


def mixed_samplings() -> list[Sampling]:
    """Greedy, plain and everything, with seeds of their own."""
    given = [*DISTRIBUTIONS.values(), Sampling(temperature=0.0)]
    return [msgspec.structs.replace(s, seed=977 * i + 1) for i, s in enumerate(given)]


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    samplings = mixed_samplings()
    count = len(samplings)
    seats = seats_of(*samplings)
    for trial in range(20):
        logits = some_logits(trial, count, vocab_size=1000)
        positions = [5 * trial + row for row in range(count)]
        together, _ = sample(
            logits, rows_of(list(range(1, count + 1)), positions), seats, EVERYTHING
        )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(trial)).tolist()
        shuffled, _ = sample(
            logits[order],
            rows_of([1 + row for row in order], [positions[row] for row in order]),
            seats,
            EVERYTHING,
        )
        for place, row in enumerate(order):
            alone, _ = sample(
                logits[row : row + 1],
                rows_of([1 + row], [positions[row]]),
                seats,
                features_of(samplings[row]),
            )
            assert alone[0] == together[row] == shuffled[place], samplings[row]


def test_positions_and_seeds_give_independent_draws() -> None:
    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
    seats = seats_of(*(Sampling(seed=seed) for seed in seeds))
    logits = torch.zeros(1, 1000)
    length = 400
    streams = [
        sample(
            logits.expand(length, -1),
            rows_of([1 + index] * length, list(range(length))),
            seats,
            Features.RANDOM,
        )[0]
        for index in range(len(seeds))
    ]
    for index, stream in enumerate(streams):
        assert len(set(stream.tolist())) > 280, "of 400 draws from 1000, about 330 differ"
        for other in streams[:index]:
            assert (stream == other).sum() < 8, "chance agrees in 0.4 places"


@pytest.mark.parametrize("temperature", [0.0, 1.4e-45, 1e-20, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = some_logits(3, rows=32, vocab_size=500)
    logits[:, 7] = logits.amax(dim=-1)  # ties with a later token
    logits[5] = 0.0
    rows = rows_of([1] * 32, list(range(32)))
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    sampling = Sampling(temperature=temperature, top_k=4, top_p=0.5, min_p=0.1)
    for features in (Features.RANDOM, Features.RANDOM | Features.TRUNCATED, EVERYTHING):
        tokens, faults = sample(logits, rows, seats_of(sampling), features)
        assert tokens.tolist() == expected
        assert not faults.any()


def test_greedy_takes_the_lowest_id_among_ties_at_any_place() -> None:
    seats = seats_of(Sampling(temperature=0.0))
    for first in range(0, 4000, 37):
        logits = torch.full((1, 4096), -1.0)
        logits[0, [first, first + 1, first + 50, 4095]] = 2.5
        tokens, _ = sample(logits, rows_of([1], [0]), seats, Features.NONE)
        assert tokens.item() == first


def test_ties_at_the_border_of_top_k_keep_the_lowest_ids() -> None:
    draws = 300
    logits = torch.zeros(1, VOCAB_SIZE)
    tokens, _ = sample(
        logits.expand(draws, -1),
        rows_of([1] * draws, list(range(draws))),
        seats_of(Sampling(top_k=3)),
        Features.RANDOM | Features.TRUNCATED,
    )
    assert sorted(set(tokens.tolist())) == [0, 1, 2]


@pytest.mark.parametrize("features", [Features.NONE, EVERYTHING])
@pytest.mark.parametrize("poison", [math.nan, INFINITY, None])
def test_a_row_that_is_not_finite_faults_alone(features: Features, poison: float | None) -> None:
    samplings = mixed_samplings()
    count = len(samplings)
    seats = seats_of(*samplings)
    logits = some_logits(1, count)
    rows = rows_of(list(range(1, count + 1)), [9] * count)
    expected, _ = sample(logits, rows, seats, features)
    if poison is None:
        logits[4] = -INFINITY
    else:
        logits[4, 39] = poison
    tokens, faults = sample(logits, rows, seats, features)
    healthy = [row for row in range(count) if row != 4]
    assert faults.tolist() == [
        RowFault.NOT_FINITE if row == 4 else RowFault.NONE for row in range(count)
    ]
    assert torch.equal(tokens[healthy], expected[healthy])
    assert 0 <= tokens[4] < VOCAB_SIZE, "still a valid id for whoever carries it over"


def test_nan_is_a_fault_even_where_it_could_not_be_drawn() -> None:
    logits = some_logits(1)
    logits[0, 30] = math.nan
    seats = seats_of(Sampling(allowed_tokens=(5, 6)))
    _, faults = sample(logits, rows_of([1], [0]), seats, EVERYTHING)
    assert faults.tolist() == [RowFault.NOT_FINITE]


def test_a_border_of_the_sums_belongs_to_the_token_behind_it() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]]).expand(5, -1)
    uniform = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    assert inverted(weights, uniform).tolist() == [1, 3, 3, 4, 4]


def test_nothing_left_to_draw_is_a_fault_of_that_row() -> None:
    everything = Sampling(
        bias_tokens=tuple(range(VOCAB_SIZE)), bias_values=(-INFINITY,) * VOCAB_SIZE
    )
    banned_allowed = Sampling(
        allowed_tokens=(5, 6), bias_tokens=(5, 6), bias_values=(-INFINITY, -INFINITY)
    )
    seats = seats_of(everything, Sampling(), banned_allowed)
    rows = rows_of([1, 2, 3], [0, 0, 0])
    _, faults = sample(some_logits(2, 3), rows, seats, EVERYTHING)
    assert faults.tolist() == [RowFault.NOT_FINITE, RowFault.NONE, RowFault.NOT_FINITE]


def test_a_row_without_result_has_no_fault() -> None:
    logits = torch.full((1, VOCAB_SIZE), math.nan)
    _, faults = sample(logits, rows_of([1], [0], [0]), seats_of(Sampling()), Features.NONE)
    assert faults.tolist() == [RowFault.NONE]


def test_lists_of_an_earlier_sequence_on_the_seat_do_not_count() -> None:
    seats = seats_of(
        Sampling(
            temperature=0.0,
            bias_tokens=(1, 2, 3),
            bias_values=(50.0, 60.0, 70.0),
            allowed_tokens=(2, 3),
        )
    )
    seats.apply(
        seat_words(LAYOUT, 1, [1], Sampling(temperature=0.0, bias_tokens=(8,), bias_values=(9.0,)))
    )
    logits = torch.zeros(1, VOCAB_SIZE)
    tokens, _ = sample(logits, rows_of([1], [0]), seats, EVERYTHING)
    assert tokens.tolist() == [8]


def test_a_whole_table_and_assignments_say_the_same() -> None:
    sampling = DISTRIBUTIONS["combined"]
    table = np.zeros((LAYOUT.seat_count, LAYOUT.words), dtype=np.int32)
    for seat, word, value in seat_words(LAYOUT, 3, [5, 9], sampling):
        table[seat, word] = value
    uploaded, assigned = SeatCopy(LAYOUT, CPU), SeatCopy(LAYOUT, CPU)
    uploaded.upload(table)
    for _ in range(2):
        assigned.apply(seat_words(LAYOUT, 3, [5, 9], sampling))
    row = torch.tensor([3])
    for seats in (uploaded, assigned):
        assert seats.block_tables(row, 3).tolist() == [[5, 9, 0]]
        assert seats.temperature(row).tolist() == [np.float32(1.3)]
        assert seats.top_k(row).tolist() == [12]
        assert seats.seed(row).tolist() == [0]
    assert torch.equal(uploaded.bias(row)[1], assigned.bias(row)[1])


def test_seeds_keep_all_their_bits() -> None:
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    seats = seats_of(*(Sampling(seed=seed) for seed in seeds))
    found = seats.seed(torch.arange(1, len(seeds) + 1))
    assert [seed % 2**64 for seed in found.tolist()] == seeds
