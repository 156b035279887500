"""The random stream is SplitMix64, reached by position."""

from __future__ import annotations

import torch

from gapless.executor.random_stream import mixed, stream_words, uniforms

torch.set_num_threads(1)
MASK = (1 << 64) - 1


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def mixed_plainly(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def test_numbers_are_the_published_ones() -> None:
    # First outputs of the reference implementation of SplitMix64 for state 1234567.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    words = stream_words(torch.full((5,), 1234567), torch.arange(5))
    assert words.tolist() == [signed(word) for word in published]


def test_integer_tensors_wrap_like_unsigned_words() -> None:
    words = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    found = mixed(torch.tensor([signed(word) for word in words]))
    assert found.tolist() == [signed(mixed_plainly(word)) for word in words]


def test_uniforms_are_even_and_below_one() -> None:
    seeds = torch.tensor([0, 1, -1, 2**62])
    values = torch.cat([uniforms(seed.expand(20_000), torch.arange(20_000)) for seed in seeds])
    assert ((values >= 0) & (values < 1)).all()
    counts = torch.histc(values, bins=50, min=0, max=1)
    expected = len(values) / 50
    assert ((counts - expected) ** 2 / expected).sum() < 105, "chi-square, 49 degrees, 1 in 10^5"


def test_streams_do_not_share_numbers() -> None:
    step = signed(0x9E3779B97F4A7C15)
    seeds = torch.tensor([5, signed((5 + step) & MASK), 6])
    streams = [set(uniforms(seed.expand(5000), torch.arange(5000)).tolist()) for seed in seeds]
    assert not streams[0] & streams[1] | streams[0] & streams[2] | streams[1] & streams[2]
