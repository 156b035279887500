"""The seat table: a record's words give back the sampling parameters bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.protos import seats
from gapless.protos.sampling import ALLOWED_TOKENS_MAX, BIAS_ENTRIES_MAX, Sampling
from gapless.protos.seats import Int32s, SeatLayout

LAYOUT = SeatLayout(seat_count=3, block_max=5)
SEED_MAX = 2**64 - 1

float32s = st.floats(width=32, allow_nan=False)
token_ids = st.integers(0, 2**31 - 1)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    bias = draw(st.lists(st.tuples(token_ids, float32s), max_size=8))
    return Sampling(
        temperature=draw(float32s),
        top_k=draw(st.integers(0, 2**31 - 1)),
        top_p=draw(float32s),
        min_p=draw(float32s),
        seed=draw(st.integers(0, SEED_MAX) | st.sampled_from([0, 2**31, 2**32, 2**63, SEED_MAX])),
        bias_tokens=tuple(token for token, _ in bias),
        bias_values=tuple(value for _, value in bias),
        allowed_tokens=tuple(draw(st.lists(token_ids, max_size=8))),
    )


def unpacked(record: Int32s) -> Sampling:
    """What an executor reads from a record, by the table in the module's docstring."""
    temperature, top_p, min_p = record[:3].view(np.float32).tolist()
    bias_count, allowed_count = record[seats.BIAS_COUNT], record[seats.ALLOWED_COUNT]
    bias_tokens = record[LAYOUT.bias_tokens_at :][:bias_count].tolist()
    bias_values = record[LAYOUT.bias_values_at :][:bias_count].view(np.float32).tolist()
    low, high = record[[seats.SEED_LOW, seats.SEED_HIGH]].view(np.uint32).tolist()
    return Sampling(
        temperature=temperature,
        top_k=int(record[seats.TOP_K]),
        top_p=top_p,
        min_p=min_p,
        seed=low | high << 32,
        bias_tokens=tuple(bias_tokens),
        bias_values=tuple(bias_values),
        allowed_tokens=tuple(record[LAYOUT.allowed_at :][:allowed_count].tolist()),
    )


@given(samplings(), samplings())
def test_sampling_words_round_trip(older: Sampling, newer: Sampling) -> None:
    table = LAYOUT.table(bytearray(LAYOUT.size_bytes))
    for sampling in (older, newer):  # the seat was used before: counts cut off what is stale
        words, values = LAYOUT.sampling_words(sampling)
        assert words.dtype == values.dtype == np.int32
        table[1, words] = values
        assert unpacked(table[1]) == sampling
    assert not table[0].any(), "the scratch seat stays empty"
    assert not table[2].any(), "a neighbour stays untouched"


def test_sampling_words_leave_the_block_table_alone() -> None:
    words, _ = LAYOUT.sampling_words(
        Sampling(bias_tokens=(1, 2), bias_values=(0.5, -np.inf), allowed_tokens=(3,))
    )
    assert len(np.unique(words)) == len(words)
    blocks = range(LAYOUT.blocks_at, LAYOUT.blocks_at + LAYOUT.block_max)
    assert not set(words.tolist()) & set(blocks)
    assert words.max() < LAYOUT.words


def test_the_longest_lists_fit() -> None:
    sampling = Sampling(
        bias_tokens=tuple(range(BIAS_ENTRIES_MAX)),
        bias_values=(1.0,) * BIAS_ENTRIES_MAX,
        allowed_tokens=tuple(range(ALLOWED_TOKENS_MAX)),
        seed=SEED_MAX,
    )
    table = LAYOUT.table(bytearray(LAYOUT.size_bytes))
    words, values = LAYOUT.sampling_words(sampling)
    table[2, words] = values
    assert unpacked(table[2]) == sampling


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(bias_tokens=(1, 2), bias_values=(1.0,)),
        Sampling(
            bias_tokens=tuple(range(BIAS_ENTRIES_MAX + 1)),
            bias_values=(1.0,) * (BIAS_ENTRIES_MAX + 1),
        ),
        Sampling(allowed_tokens=tuple(range(ALLOWED_TOKENS_MAX + 1))),
    ],
)
def test_lists_beyond_their_limits_are_our_mistake(sampling: Sampling) -> None:
    with pytest.raises(AssertionError):
        LAYOUT.sampling_words(sampling)


@given(seat_count=st.integers(1, 300), block_max=st.integers(1, 300))
def test_the_table_covers_its_region_exactly(seat_count: int, block_max: int) -> None:
    layout = SeatLayout(seat_count, block_max)
    assert layout.blocks_at == seats.HEAD_WORDS > seats.ALLOWED_COUNT
    assert layout.allowed_at + ALLOWED_TOKENS_MAX == layout.words
    region = bytearray(layout.size_bytes)
    table = layout.table(region)
    assert table.shape == (seat_count, layout.words)
    table[-1, -1] = -1
    assert region[-4:] == b"\xff" * 4
