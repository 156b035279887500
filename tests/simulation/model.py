"""The fake model, twice: what one sequence says by itself, and the constants of its hash.

Position p of a sequence has a cell, a chain over the tokens so far::

    cell[p] = cell[p-1] * CHAIN + mark(token[p])          cell[-1] = START
    next    = mix(cell[0] + ... + cell[p] + seed * SPREAD + (p + 1)) mod vocab        (uint64)

The next token depends on *every* cell, as attention does, so one wrong block shows. `continuation`
computes this with plain integers, one sequence at a time, without batches, blocks or steps.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from gapless.protos.messages import FinishReason, Stopping, Vocabulary

Words = npt.NDArray[np.uint64]

MASK = (1 << 64) - 1
CHAIN = 0x9E3779B97F4A7C15
START = 0x243F6A8885A308D3
SPREAD = 0xD1342543DE82EF95
VOCAB_SIZE = 96
SPECIAL_TOKENS = frozenset({0, 1, 2, 3})
TEXTS = tuple(
    b"<s>" if token in SPECIAL_TOKENS else (b"ab", b"b", b"ca", b"bca", b"c", b"a")[token % 6]
    for token in range(VOCAB_SIZE)
)


def mix(word: int) -> int:
    """A bijection of 64-bit words that spreads every bit (the finaliser of splitmix64)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


MARKS = tuple(mix(token + 1) for token in range(VOCAB_SIZE))
"""A random word for each token."""


@dataclasses.dataclass(frozen=True, slots=True)
class Continuation:
    """What a sequence says when it is left alone."""

    tokens: tuple[int, ...]
    reason: FinishReason
    stop_token: int | None = None
    stop_string_index: int | None = None


def vocabulary() -> Vocabulary:
    """The texts of the fake model's tokens, as a gateway sends them."""
    return Vocabulary(
        data=b"".join(TEXTS),
        ends=np.cumsum([len(text) for text in TEXTS]).astype(np.uint32).tobytes(),
        special=bytes(token in SPECIAL_TOKENS for token in range(VOCAB_SIZE)),
    )


def continuation(
    prompt: list[int], seed: int, stopping: Stopping, sequence_tokens_max: int
) -> Continuation:
    """All new tokens of a sequence and why it ends."""
    cell, total, text = START, seed * SPREAD & MASK, b""
    for token in prompt:
        cell = (cell * CHAIN + MARKS[token]) & MASK
        total += cell
    limit = min(len(prompt) + stopping.max_new_tokens, sequence_tokens_max)
    tokens: list[int] = []
    while True:
        position = len(prompt) + len(tokens)
        token = mix((total + position) & MASK) % VOCAB_SIZE
        tokens.append(token)
        counts = len(tokens) >= stopping.min_new_tokens
        if counts and token in stopping.stop_tokens:
            return Continuation(tuple(tokens), FinishReason.STOP_TOKEN, stop_token=token)
        if stopping.stop_strings:
            before = len(text)
            if not (stopping.skip_special_tokens and token in SPECIAL_TOKENS):
                text += TEXTS[token]
            index = _first_stop_string(text, before, stopping.stop_strings) if counts else None
            if index is not None:
                return Continuation(
                    tuple(tokens), FinishReason.STOP_STRING, stop_string_index=index
                )
        if position + 1 == limit:
            is_room = stopping.max_new_tokens_is_room
            reason = FinishReason.CONTEXT_LENGTH if is_room else FinishReason.MAX_NEW_TOKENS
            return Continuation(tuple(tokens), reason)
        cell = (cell * CHAIN + MARKS[token]) & MASK
        total += cell


def _first_stop_string(text: bytes, before: int, stop_strings: tuple[bytes, ...]) -> int | None:
    """The stop string that ends first behind `before`; of several there, the longest."""
    for end in range(before + 1, len(text) + 1):
        matches = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if matches:
            return stop_strings.index(max(matches, key=len))
    return None
