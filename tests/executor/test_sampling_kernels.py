"""The sampling kernels draw what the torch sampler draws, token for token.

Without a GPU they run in Triton's interpreter (tests/conftest.py), on small vocabularies and with
few lanes; tests/gpu compares them at full size.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.protos.sampling import Sampling
from gapless.protos.slots import Features, RowFault

pytest.importorskip("triton", reason="triton is not installed: no interpreter for the kernels")

from tests.executor.compiling import compiled_count
from tests.executor.drawing import EVERYTHING, Table

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB_SIZE = 700
TILE = 256
SAMPLE = 64
"""So a row has three tiles, and guesses of borders miss now and then."""
TRUNCATED = Features.RANDOM | Features.TRUNCATED
GREEDY = Sampling(temperature=0.0)


def table(
    *samplings: Sampling, vocab_size: int = VOCAB_SIZE, sample: int = SAMPLE, rounds: int = 2
) -> Table:
    found = Table(samplings, vocab_size, DEVICE, tile=TILE, sample=sample, rounds=rounds)
    found.place(range(3, 3 + len(samplings)))
    return found


def normal(rows: int, seed: int, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB_SIZE, generator=generator) * spread).to(DEVICE)


def logits_of_kind(kind: str, rows: int) -> Tensor:
    values = normal(rows, seed=len(kind))
    if kind == "bfloat16":
        return values.bfloat16()
    if kind == "ties":
        return values.round().clamp(-1, 1).bfloat16()
    if kind == "equal":
        return torch.where(values > 0, 0.0, -0.0).bfloat16()
    if kind == "banned":
        return values.masked_fill(values < 2.0, -math.inf)
    if kind == "peaked":
        values[:, 300] += 16.0
    return values


SAMPLINGS = (
    GREEDY,
    Sampling(seed=1),
    Sampling(temperature=0.6, top_k=20, top_p=0.9, seed=2),
    Sampling(temperature=1.5, top_p=0.95, min_p=0.02, seed=3),
    Sampling(top_k=300, seed=2**64 - 1),
    Sampling(temperature=3.0, top_k=VOCAB_SIZE - 1, top_p=0.999, seed=5),
)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "ties", "equal", "banned", "peaked"])
def test_kernels_draw_what_torch_draws(kind: str) -> None:
    rows = table(*SAMPLINGS)
    logits = logits_of_kind(kind, len(SAMPLINGS) + 2)
    assert rows.by_kernels(logits, TRUNCATED) == rows.by_torch(logits, TRUNCATED)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("offset", [30.0, -30.0])
@pytest.mark.parametrize("kind", ["float32", "ties"])
def test_borders_that_are_guessed_wrong_are_found(kind: str, offset: float, rounds: int) -> None:
    rows = table(*SAMPLINGS, rounds=rounds)
    logits = logits_of_kind(kind, len(SAMPLINGS)).float()
    sampled = torch.arange(SAMPLE)
    # Runs of four at equal distances: all that is sampled is unlike the rest.
    logits[:, sampled // 4 * (4 * (VOCAB_SIZE // SAMPLE)) + sampled % 4] += offset
    assert rows.by_kernels(logits, TRUNCATED) == rows.by_torch(logits, TRUNCATED)


def test_most_candidates_in_one_tile_and_more_than_are_looked_at_together() -> None:
    vocab_size = 6000
    rows = Table(SAMPLINGS, vocab_size, DEVICE, tile=4096, sample=128)
    rows.place(range(len(SAMPLINGS)))
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(len(SAMPLINGS), vocab_size, generator=generator).to(DEVICE)
    logits[:, :3000] = logits[:, :3000].round() + 1.0
    assert rows.by_kernels(logits, TRUNCATED) == rows.by_torch(logits, TRUNCATED)


@pytest.mark.parametrize("levels", [4, 16])
def test_a_border_right_behind_the_top(levels: int) -> None:
    # Top-k is found in the first bracket, and top-p before it; few distinct logits lie between.
    vocab_size = 6000
    samplings = [Sampling(top_k=2000 + 150 * row, top_p=0.9, seed=row) for row in range(12)]
    rows = Table(samplings, vocab_size, DEVICE, tile=4096, sample=1024)
    rows.place(range(len(samplings)))
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(samplings), vocab_size, generator=generator).to(DEVICE) * levels
    logits = logits.round() / levels
    assert rows.by_kernels(logits, TRUNCATED) == rows.by_torch(logits, TRUNCATED)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled for this GPU anyway"
)
def test_the_kernels_compile_for_hopper() -> None:
    assert compiled_count("tests.executor.compile_sampling") == 8


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    temperature=st.sampled_from([0.0, 1e-6, 1e-5, 0.05, 0.7, 1.0, 20.0]),
    top_k=st.sampled_from([0, 1, 2, 255, 256, 257, 699, 700, 10_000]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 1 - 2.0**-24, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    levels=st.sampled_from([1, 2, 5, 1000]),
)
def test_any_parameters(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int, levels: int
) -> None:
    rows = table(
        Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    )
    logits = (normal(1, seed % 997) * levels).round() / levels
    assert rows.by_kernels(logits, TRUNCATED) == rows.by_torch(logits, TRUNCATED)


def test_the_first_of_equal_maxima_is_taken_at_any_place() -> None:
    rows = table(*[GREEDY] * 8)
    for first in (0, 1, 255, 256, 511, 512, 698):
        logits = torch.full((8, VOCAB_SIZE), -1.0, device=DEVICE)
        logits[:, [first, first + 1, 699]] = 2.5
        assert rows.by_kernels(logits, Features.NONE).tokens == [first] * 8


@pytest.mark.parametrize("features", [Features.NONE, TRUNCATED])
def test_rows_that_are_not_finite_fault_alone(features: Features) -> None:
    rows = table(*SAMPLINGS)
    logits = normal(len(SAMPLINGS), 1)
    healthy = rows.by_torch(logits, features)
    logits[1, 399] = math.nan
    logits[3, 699] = math.inf
    logits[4] = -math.inf
    drawn = rows.by_kernels(logits, features)
    assert drawn.faults == [
        RowFault.NOT_FINITE if row in (1, 3, 4) else RowFault.NONE for row in range(6)
    ]
    assert [drawn.tokens[row] for row in (0, 2, 5)] == [healthy.tokens[row] for row in (0, 2, 5)]
    assert all(0 <= token < VOCAB_SIZE for token in drawn.tokens), "someone carries it over"


def test_biases_and_allowed_lists() -> None:
    rows = table(
        Sampling(temperature=0.0, bias_tokens=(7, 600), bias_values=(30.0, 30.001)),
        Sampling(bias_tokens=(3,), bias_values=(-math.inf,), top_k=9),
        Sampling(allowed_tokens=(5, 300, 699), temperature=4.0),
        Sampling(allowed_tokens=(5,), bias_tokens=(5,), bias_values=(-math.inf,)),
        GREEDY,
        Sampling(allowed_tokens=(5, 6)),
    )
    logits = normal(6, 4).bfloat16()
    logits[5, 30] = math.nan  # a fault, even where it could not be drawn
    drawn = rows.by_kernels(logits, EVERYTHING)
    expected = rows.by_torch(logits, EVERYTHING)
    assert drawn.faults == expected.faults == [0, 0, 0, 1, 0, 1]
    healthy = (0, 1, 2, 4)
    assert [drawn.tokens[row] for row in healthy] == [expected.tokens[row] for row in healthy]


def test_a_row_whose_token_nobody_wants_has_no_fault_and_a_valid_token() -> None:
    rows = table(Sampling(), GREEDY)
    rows.rows[5] = 0
    logits = torch.full((2, VOCAB_SIZE), math.nan, device=DEVICE)
    drawn = rows.by_kernels(logits, Features.RANDOM)
    assert drawn.faults == [0, 0]
    assert all(0 <= token < VOCAB_SIZE for token in drawn.tokens)


def test_a_vocabulary_of_one_tile() -> None:
    rows = table(*SAMPLINGS, vocab_size=37)
    logits = normal(len(SAMPLINGS), 6)[:, :37].contiguous()
    assert rows.by_kernels(logits, TRUNCATED) == rows.by_torch(logits, TRUNCATED)
