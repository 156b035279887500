"""The sampler's rules as kernels, in Triton: the best token of each row, and a draw from a row.

Owns the kernels and what they hand to each other; `sampler` owns the rules and is what the tests
compare these with, `border_kernel` finds where top-k and top-p end. Called by `cuda_sampler`.

A row of logits is read in *tiles* of consecutive token ids. Sums over tiles are taken in float64 in
one order that depends on nothing but the vocabulary, so a token does not depend on the other rows.

A token's *distance* is how far its tempered logit lies below the best one, in units of log 2, and
its *key* the bits of that float32: distances are not negative, so keys have their order. The
*weight* is 2 to the power of minus the distance. Kept are the tokens of a key below the row's
*border*, and of those at the border the first ones, as many as there is *room* for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.executor.sampler import GREEDY_TEMPERATURE, LOG2_E
from gapless.protos import seats
from gapless.protos.slots import Header

SEAT_COLUMN = tl.constexpr(0)
CONTEXT_COLUMN = tl.constexpr(4)
RESULT_COLUMN = tl.constexpr(5)
"""Columns of a slot's rows."""
ROW_COUNT = tl.constexpr(int(Header.ROW_COUNT))
TEMPERATURE = tl.constexpr(seats.TEMPERATURE)
MIN_P = tl.constexpr(seats.MIN_P)
SEED_LOW = tl.constexpr(seats.SEED_LOW)
SEED_HIGH = tl.constexpr(seats.SEED_HIGH)
GREEDY_BELOW = tl.constexpr(GREEDY_TEMPERATURE)
SCALE = tl.constexpr(LOG2_E)
INFINITE_KEY = tl.constexpr(0x7F800000)
NO_KEY = tl.constexpr(0x7FFFFFFF)
"""Behind the row's end; above every border."""


@triton.jit
def keys_of(logits, ids, VOCAB: tl.constexpr, best, scale):
    """Keys of the tokens `ids` of the row that `logits` points to."""
    inside = ids < VOCAB
    values = tl.load(logits + ids, mask=inside, other=0.0).to(tl.float32)
    distances = tl.abs((best - values) * scale)  # not less than 0, but -0.0 - 0.0 is -0.0
    return tl.where(inside, distances.to(tl.int32, bitcast=True), NO_KEY)


@triton.jit
def weights_of(keys):
    """Weights in float32; 0 for NO_KEY."""
    distances = tl.where(keys == NO_KEY, INFINITE_KEY, keys).to(tl.float32, bitcast=True)
    return tl.exp2(-distances)


@triton.jit
def seat_float(table, seat_words, seat, word: tl.constexpr):
    """A float32 of a seat's record."""
    return tl.load(table + seat.to(tl.int64) * seat_words + word).to(tl.float32, bitcast=True)


@triton.jit
def best_of_tiles(logits, values, tokens, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The greatest logit of each tile and the first token that has it; infinite where NaN is.

    Grid (tiles, rows).
    """
    tile = tl.program_id(0)
    row = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    place = logits + row.to(tl.int64) * VOCAB
    found = tl.load(place + ids, mask=ids < VOCAB, other=-float("inf")).to(tl.float32)
    found = tl.where(found == found, found, float("inf"))
    best, first = tl.max(found, axis=0, return_indices=True)
    tl.store(values + row * tl.num_programs(0) + tile, best)
    tl.store(tokens + row * tl.num_programs(0) + tile, tile * TILE + first)


@triton.jit
def best_of_rows(
    header,
    rows,
    row_max,
    table,
    seat_words,
    values,
    tokens,
    tile_count,
    sampled,
    faults,
    best_out,
    scale_out,
    border_out,
    room_out,
    RANDOM: tl.constexpr,
    TILES: tl.constexpr,
):
    """The greedy token and the fault of each row, and, if `RANDOM`, what its draw starts from.

    A scale of 0 says that the row has no draw: it is greedy, faulty, padding, or nobody wants its
    token. Grid (rows,).
    """
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    inside = tiles < tile_count
    found = tl.load(values + row * tile_count + tiles, mask=inside, other=-float("inf"))
    best, tile = tl.max(found, axis=0, return_indices=True)
    finite = tl.abs(best) < float("inf")
    wanted = row < tl.load(header + ROW_COUNT)
    wanted = wanted & (tl.load(rows + RESULT_COLUMN * row_max + row) > 0)
    tl.store(sampled + row, tl.load(tokens + row * tile_count + tile))
    tl.store(faults + row, (wanted & (finite == 0)).to(tl.int32))
    if RANDOM:
        seat = tl.where(wanted, tl.load(rows + SEAT_COLUMN * row_max + row), 0)
        temperature = seat_float(table, seat_words, seat, TEMPERATURE)
        draws = wanted & finite & (temperature >= GREEDY_BELOW)
        divisor = tl.where(draws, temperature, 1.0)
        tl.store(best_out + row, best)
        tl.store(scale_out + row, tl.where(draws, tl.div_rn(SCALE + 0.0 * divisor, divisor), 0.0))
        tl.store(border_out + row, INFINITE_KEY)
        tl.store(room_out + row, 0)


@triton.jit
def weights_of_tiles(
    logits,
    VOCAB: tl.constexpr,
    rows,
    row_max,
    table,
    seat_words,
    best_in,
    scale_in,
    border_in,
    masses,
    tie_counts,
    TILE: tl.constexpr,
):
    """For each tile the weight below the border, and how many tokens stand at it.

    Grid (tiles, rows).
    """
    tile = tl.program_id(0)
    row = tl.program_id(1)
    scale = tl.load(scale_in + row)
    if scale > 0.0:
        ids = tile * TILE + tl.arange(0, TILE)
        place = logits + row.to(tl.int64) * VOCAB
        keys = keys_of(place, ids, VOCAB, tl.load(best_in + row), scale)
        border = tl.load(border_in + row)
        min_p = seat_float(table, seat_words, tl.load(rows + SEAT_COLUMN * row_max + row), MIN_P)
        weights = weights_of(keys)
        kept = (keys < border) & (weights >= min_p)
        mass = tl.sum(tl.where(kept, weights, 0.0).to(tl.float64), axis=0)
        tl.store(masses + row * tl.num_programs(0) + tile, mass)
        ties = tl.sum((keys == border).to(tl.int32), axis=0)
        tl.store(tie_counts + row * tl.num_programs(0) + tile, ties)


@triton.jit
def _drawn_tile(masses, tie_counts, tile_count, room, at_border, share, TILES: tl.constexpr):
    """The tile in which the row's weight reaches its `share`.

    `at_border` is the weight of a token at the border, of which the row has `room`.

    Returns:
        The tile, its room at the border, and the weight to be reached in it.
    """
    tiles = tl.arange(0, TILES)
    inside = tiles < tile_count
    counts = tl.load(tie_counts + tiles, mask=inside, other=0)
    rooms = room - (tl.cumsum(counts, axis=0) - counts)
    rooms = tl.minimum(tl.maximum(rooms, 0), counts)
    mass = tl.load(masses + tiles, mask=inside, other=0.0)
    mass += rooms.to(tl.float64) * at_border.to(tl.float64)
    ends = tl.cumsum(mass, axis=0)
    target = share * tl.max(ends, axis=0)
    tile = tl.minimum(tl.sum((ends <= target).to(tl.int32), axis=0), tile_count - 1)
    before = tl.sum(tl.where(tiles == tile - 1, ends, 0.0), axis=0)
    return tile, tl.sum(tl.where(tiles == tile, rooms, 0), axis=0), target - before


@triton.jit
def draw(
    logits,
    VOCAB: tl.constexpr,
    rows,
    row_max,
    table,
    seat_words,
    best_in,
    scale_in,
    border_in,
    room_in,
    masses,
    tie_counts,
    tile_count,
    sampled,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Replaces the greedy tokens of the rows that draw: the tile first, then the token in it.

    Grid (rows,).
    """
    row = tl.program_id(0)
    scale = tl.load(scale_in + row)
    if scale > 0.0:
        seat = tl.load(rows + SEAT_COLUMN * row_max + row)
        min_p = seat_float(table, seat_words, seat, MIN_P)
        border = tl.load(border_in + row)
        at_border = weights_of(border)
        at_border = tl.where(at_border >= min_p, at_border, 0.0)
        position = tl.load(rows + CONTEXT_COLUMN * row_max + row)
        share = uniform(table, seat_words, seat, position)
        places = row * tile_count
        tile, room, target = _drawn_tile(
            masses + places,
            tie_counts + places,
            tile_count,
            tl.load(room_in + row),
            at_border,
            share,
            TILES,
        )
        ids = tile * TILE + tl.arange(0, TILE)
        place = logits + row.to(tl.int64) * VOCAB
        keys = keys_of(place, ids, VOCAB, tl.load(best_in + row), scale)
        weights = weights_of(keys)
        ties = keys == border
        ranks = tl.cumsum(ties.to(tl.int32), axis=0)
        kept = (keys < border) | (ties & (ranks <= room))
        weights = tl.where(kept & (weights >= min_p), weights, 0.0)
        found = (tl.cumsum(weights.to(tl.float64), axis=0) > target) & (weights > 0.0)
        token = tl.min(tl.where(found, ids, VOCAB), axis=0)
        # Sums rounded in another order might leave nothing: then the best stays.
        if token < VOCAB:
            tl.store(sampled + row, token)


@triton.jit
def mixed(word):
    """SplitMix64's mixing function, as `random_stream.mixed`; uint64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def uniform(table, seat_words, seat, position):
    """The row's number in [0, 1), as `random_stream.uniforms`; float64."""
    record = table + seat.to(tl.int64) * seat_words
    low = tl.load(record + SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    start = mixed((high << 32) | low)
    index = (position + 1).to(tl.uint64)
    word = mixed(start + index * 0x9E3779B97F4A7C15)
    return (word >> 11).to(tl.float64) * (1.0 / (1 << 53))
