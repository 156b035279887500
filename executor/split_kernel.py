"""A row of logits split where its border probably is, in Triton: few candidates, sums of the rest.

Owns the state of a row that looks for its border. For words see `sampling_kernels`. Called by
`cuda_sampler`, and by `border_kernel`, which looks for the border among the candidates.

    keys:   [ top ] [ middle ] [ bracket ] [ tail ]
                   ^TOP       ^FROM       ^TO

The keys of the top and of the bracket, few, are copied to the row's *candidates*; of the middle,
and of all, sums are taken. A sample of the row says where the bracket should be: thousands of
tokens around a border are few of a vocabulary. The top is for rows in which a few tokens, of which
a sample knows nothing, have most of the weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.executor.sampling_kernels import (
    BORDER,
    INFINITE_KEY,
    ROOM,
    SEAT_COLUMN,
    STATE_WORDS,
    distances_of,
    doubles_of,
    keys_of,
    seat_float,
    weights_of,
)
from gapless.protos import seats

MIN_P = tl.constexpr(seats.MIN_P)
TOP_P = tl.constexpr(seats.TOP_P)
TOP_K = tl.constexpr(seats.TOP_K)
STAGE = tl.constexpr(2)
LOW = tl.constexpr(3)
HIGH = tl.constexpr(4)
"""The border is one of the keys ``(LOW, HIGH]``."""
TOP = tl.constexpr(5)
FROM = tl.constexpr(6)
TO = tl.constexpr(7)
"""Words of a row's state, after those that `sampling_kernels` reads."""
FIND_TOP_K = tl.constexpr(0)
FIND_TOP_P = tl.constexpr(1)
WEIGH = tl.constexpr(2)
DONE = tl.constexpr(3)
"""Stages: what a row needs of its split. `WEIGH`: the tiles' weights below a known border."""
RESOLUTION = tl.constexpr(1 << 13)
"""Keys of a sample are told apart to within this: 2**-10 of the distance."""
TOP_SHARE = tl.constexpr(80)
"""One of so many tokens of a sample is in the top."""


@triton.jit
def _quantiles(keys, values, low, high, targets):
    """For each of the targets ``[columns]`` a bracket of the key at which the values reach it."""
    lows = low + tl.zeros_like(targets).to(tl.int32)
    highs = high + tl.zeros_like(targets).to(tl.int32)
    while tl.max(highs - lows, axis=0) > RESOLUTION:
        middles = lows + (highs - lows) // 2
        within = keys[:, None] <= middles[None, :]
        reached = tl.sum(tl.where(within, values[:, None], 0.0), axis=0) >= targets
        lows = tl.where(reached, lows, middles)
        highs = tl.where(reached, middles, highs)
    return lows, highs


@triton.jit
def proposed(row, low, high, share, by_mass, SAMPLE: tl.constexpr):
    """Top, and start and end of the bracket, from a sample of the row's keys of ``(low, high]``.

    The border has the `share` of what these have before it, tokens or weight.
    """
    logits, vocab, best, scale = row
    # Runs of four ids at equal distances; four, as the row's start is aligned to so many.
    places = tl.arange(0, SAMPLE)
    places = (places // 4) * (4 * (vocab // SAMPLE)) + places % 4
    keys = keys_of(distances_of(logits, places, vocab, best, scale))
    inside = (keys > low) & (keys <= high) & (places < vocab)
    ones = tl.where(inside, 1.0, 0.0)
    total = tl.sum(ones, axis=0)
    start = tl.maximum(tl.min(tl.where(inside, keys, high), axis=0) - 1, low)
    end = tl.minimum(tl.max(tl.where(inside, keys, low), axis=0) + 1, high)
    rank = share * total
    if by_mass:
        weights = tl.where(inside, weights_of(keys), 0.0)
        target = share * tl.sum(weights, axis=0) + tl.zeros([1], tl.float32)
        key = tl.max(_quantiles(keys, weights, start, end, target)[1], axis=0)
        rank = tl.sum(tl.where(keys <= key, ones, 0.0), axis=0)
    # Three times the deviation of the border's rank, that a sample of so many has.
    margin = 3.0 * tl.sqrt(tl.maximum(rank * (1.0 - rank / total), 0.0)) + 2.0
    column = tl.arange(0, 4)
    ranks = tl.where(
        column == 0, SAMPLE // TOP_SHARE, tl.where(column == 1, rank - margin, rank + margin)
    )
    lows, highs = _quantiles(keys, ones, start, end, ranks)
    lows = tl.where(lows == start, low, lows)
    highs = tl.where(highs == end, high, highs)
    top = tl.sum(tl.where(column == 0, lows, 0), axis=0)
    first = tl.sum(tl.where(column == 1, lows, 0), axis=0)
    return top, first, tl.sum(tl.where(column == 2, highs, 0), axis=0)


@triton.jit
def min_p_border(min_p):
    """The smallest key of a weight below `min_p`, at most the infinite one."""
    low = tl.zeros([], tl.int32) - 1
    high = low + 1 + INFINITE_KEY
    if min_p > 0.0:
        while high - low > 1:
            middle = low + (high - low) // 2
            below = weights_of(middle) < min_p
            low = tl.where(below, low, middle)
            high = tl.where(below, middle, high)
    return high


@triton.jit
def propose(
    logits,
    VOCAB: tl.constexpr,
    rows,
    row_max,
    table,
    seat_words,
    best_in,
    scale_in,
    states,
    kept_masses,
    SAMPLE: tl.constexpr,
):
    """Where each row's border probably is, or is without a search. Grid (rows,)."""
    index = tl.program_id(0)
    scale = tl.load(scale_in + index)
    if scale > 0.0:
        seat = tl.load(rows + SEAT_COLUMN * row_max + index)
        top_k = tl.load(table + seat.to(tl.int64) * seat_words + TOP_K)
        top_p = seat_float(table, seat_words, seat, TOP_P)
        by_count = (top_k > 0) & (top_k < VOCAB)
        state = states + index * STATE_WORDS
        if by_count | (top_p < 1.0):
            row = (logits + index.to(tl.int64) * VOCAB, VOCAB, tl.load(best_in + index), scale)
            share = tl.where(by_count, top_k.to(tl.float32) / VOCAB, top_p)
            tl.store(kept_masses + index, -1.0)
            none = tl.zeros([], tl.int32)
            high = none + INFINITE_KEY
            top, first, last = proposed(row, none - 1, high, share, by_count == 0, SAMPLE)
            tl.store(state + STAGE, tl.where(by_count, FIND_TOP_K, FIND_TOP_P))
            tl.store(state + LOW, -1)
            tl.store(state + HIGH, INFINITE_KEY)
            store_split(state, top, first, last)
        else:
            border = min_p_border(seat_float(table, seat_words, seat, MIN_P))
            tl.store(state + STAGE, WEIGH)
            tl.store(state + BORDER, border)
            tl.store(state + ROOM, 0)
            store_split(state, -1, border - 1, border - 1)


@triton.jit
def store_split(state, top, first, last):
    tl.store(state + TOP, top)
    tl.store(state + FROM, first)
    tl.store(state + TO, last)


@triton.jit
def split(row, state, parts, tile, TILE: tl.constexpr, TILES: tl.constexpr):
    """Splits a tile of the row: its sums and candidates."""
    logits, vocab, best, scale = row
    masses, counts, candidates = parts
    top = tl.load(state + TOP).to(tl.float32, bitcast=True)
    first = tl.load(state + FROM).to(tl.float32, bitcast=True)
    last = tl.load(state + TO).to(tl.float32, bitcast=True)
    ids = tl.arange(0, TILE // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    distances = distances_of(logits, tile * TILE + ids, vocab, best, scale)
    # Two numbers in a word: candidates, and the middle's tokens. Keys are compared as floats: a key
    # of -1, which none reaches, is NaN.
    numbers = tl.where(distances <= last, 1, 0)
    numbers = tl.where(distances <= first, 1 << 16, numbers)
    numbers = tl.where(distances <= top, 1, numbers)
    weights = tl.exp2(-distances)
    middle = doubles_of(tl.where(numbers > 1, weights, 0.0))
    tl.store(masses + tile, tl.sum(tl.sum(middle, axis=1), axis=0))
    tl.store(masses + TILES + tile, tl.sum(tl.sum(doubles_of(weights), axis=1), axis=0))
    of_lanes = tl.sum(numbers, axis=1)
    slots = (tl.cumsum(of_lanes, axis=0) - of_lanes)[:, None] + tl.cumsum(numbers, axis=1) - 1
    tl.store(candidates + tile * TILE + (slots & 0xFFFF), distances, mask=numbers == 1)
    total = tl.sum(of_lanes, axis=0)
    tl.store(counts + tile, total >> 16)
    tl.store(counts + TILES + tile, total & 0xFFFF)


@triton.jit
def split_tiles(
    logits,
    VOCAB: tl.constexpr,
    best_in,
    scale_in,
    states,
    masses,
    counts,
    candidates,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Splits each tile of the rows that are not done.

    `masses`, ``[rows, 2, TILES]``, gets each tile's weight in the middle, then in all; `counts`,
    ``[rows, 3, TILES]``, its tokens in the middle, then its candidates. Grid (tiles, rows).
    """
    index = tl.program_id(1)
    scale = tl.load(scale_in + index)
    if scale > 0.0:
        state = states + index * STATE_WORDS
        if tl.load(state + STAGE) != DONE:
            row = (logits + index.to(tl.int64) * VOCAB, VOCAB, tl.load(best_in + index), scale)
            parts = parts_of(index, VOCAB, masses, counts, candidates, TILE, TILES)
            split(row, state, parts, tl.program_id(0), TILE, TILES)


@triton.jit
def parts_of(index, vocab, masses, counts, candidates, TILE: tl.constexpr, TILES: tl.constexpr):
    """Where the sums and candidates of a row are."""
    place = index.to(tl.int64) * (tl.cdiv(vocab, TILE) * TILE)
    return masses + index * 2 * TILES, counts + index * 3 * TILES, candidates + place
