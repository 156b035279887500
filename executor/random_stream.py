"""The random stream: one uniform number for each (seed, position), and nothing else.

Owns the mapping. It has no state, so a draw does not depend on what else is in the batch, on the
device, or on how often a step is repeated.

The numbers are those of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): its state advances by a constant, so number n is reached directly. The
stream's start is the seed after one pass of the same mixing function; otherwise seeds that differ
by a multiple of the constant would share a stream, shifted. All arithmetic is on int64 and wraps.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_WORD: Final = 1 << 64


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - _WORD if word >= _WORD >> 1 else word


GOLDEN_STEP: Final = _signed(0x9E3779B97F4A7C15)
FIRST_FACTOR: Final = _signed(0xBF58476D1CE4E5B9)
SECOND_FACTOR: Final = _signed(0x94D049BB133111EB)
UNIFORM_BITS: Final = 53


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2**-53.

    Args:
        seeds: int64 ``[rows]``, the bits of unsigned seeds.
        positions: int64 ``[rows]``, the position of the token to be drawn.

    Returns:
        float64 ``[rows]``.
    """
    words = stream_words(mixed(seeds), positions)
    return _shifted_right(words, 64 - UNIFORM_BITS).to(torch.float64) * 2.0**-UNIFORM_BITS


def stream_words(starts: Tensor, indices: Tensor) -> Tensor:
    """Number `indices` (from 0) of SplitMix64 started with state `starts`, int64 ``[rows]``."""
    return mixed(starts + (indices + 1) * GOLDEN_STEP)


def mixed(words: Tensor) -> Tensor:
    """SplitMix64's mixing function, a bijection of int64."""
    words = (words ^ _shifted_right(words, 30)) * FIRST_FACTOR
    words = (words ^ _shifted_right(words, 27)) * SECOND_FACTOR
    return words ^ _shifted_right(words, 31)


def _shifted_right(words: Tensor, bits: int) -> Tensor:
    """Logical shift: zeros come in from the left."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
