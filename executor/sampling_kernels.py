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
SEED_LOW = tl.constexpr(seats.SEED_LOW)
SEED_HIGH = tl.constexpr(seats.SEED_HIGH)
GREEDY_BELOW = tl.constexpr(GREEDY_TEMPERATURE)
SCALE = tl.constexpr(LOG2_E)
INFINITE_KEY = tl.constexpr(0x7F800000)
BEHIND = tl.constexpr(0x7FFFFFFF)
"""Above every key."""
STATE_WORDS = tl.constexpr(8)
BORDER = tl.constexpr(0)
ROOM = tl.constexpr(1)
"""Words of a row's state, int32; the others are `split_kernel`'s."""


@triton.jit
def distances_of(logits, ids, VOCAB: tl.constexpr, best, scale):
    """Distances of the tokens `ids` of the row that `logits` points to; infinite behind its end."""
    values = tl.load(logits + ids, mask=ids < VOCAB, other=-float("inf")).to(tl.float32)
    return (best - values) * scale


@triton.jit
def keys_of(distances):
    """Keys in int32."""
    return tl.abs(distances).to(tl.int32, bitcast=True)  # as -0.0 - 0.0 is -0.0


@triton.jit
def weights_of(keys):
    """Weights in float32."""
    return tl.exp2(-keys.to(tl.float32, bitcast=True))


@triton.jit
def doubles_of(weights):
    """Float64 of what is not negative, by its bits: the units that convert are few, and busy.

    0 becomes 2**-127.
    """
    bits = weights.to(tl.int32, bitcast=True).to(tl.int64)
    return ((bits << 29) + ((1023 - 127) << 52)).to(tl.float64, bitcast=True)


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
    states,
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
        tl.store(states + row * STATE_WORDS + BORDER, INFINITE_KEY)
        tl.store(states + row * STATE_WORDS + ROOM, 0)


@triton.jit
def weights_of_tiles(
    logits,
    VOCAB: tl.constexpr,
    best_in,
    scale_in,
    masses,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The weight of each tile, of rows without a border; to ``[rows, 2, TILES]``.

    Grid (tiles, rows).
    """
    tile = tl.program_id(0)
    row = tl.program_id(1)
    scale = tl.load(scale_in + row)
    if scale > 0.0:
        ids = tile * TILE + tl.arange(0, TILE)
        place = logits + row.to(tl.int64) * VOCAB
        weights = tl.exp2(-distances_of(place, ids, VOCAB, tl.load(best_in + row), scale))
        tl.store(masses + row * 2 * TILES + tile, tl.sum(doubles_of(weights), axis=0))


@triton.jit
def _drawn_tile(mass, ties, tile_count, room, at_border, share, TILES: tl.constexpr):
    """The tile in which the row's weight reaches its `share`.

    `mass` is each tile's weight below the border, `ties` the number of its tokens at it; they
    weigh `at_border` each, and the row has `room` for so many.

    Returns:
        The tile, its room at the border, and the weight to be reached in it.
    """
    tiles = tl.arange(0, TILES)
    rooms = room - (tl.cumsum(ties, axis=0) - ties)
    rooms = tl.minimum(tl.maximum(rooms, 0), ties)
    ends = tl.cumsum(mass + rooms.to(tl.float64) * at_border.to(tl.float64), axis=0)
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
    states,
    masses,
    tie_counts,
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
        border = tl.load(states + row * STATE_WORDS + BORDER)
        position = tl.load(rows + CONTEXT_COLUMN * row_max + row)
        tiles = tl.arange(0, TILES)
        tile, room, target = _drawn_tile(
            tl.load(masses + row * 2 * TILES + tiles),
            tl.load(tie_counts + row * 3 * TILES + tiles),
            tl.cdiv(VOCAB, TILE),
            tl.load(states + row * STATE_WORDS + ROOM),
            weights_of(border),
            uniform(table, seat_words, seat, position),
            TILES,
        )
        ids = tile * TILE + tl.arange(0, TILE)
        place = logits + row.to(tl.int64) * VOCAB
        keys = keys_of(distances_of(place, ids, VOCAB, tl.load(best_in + row), scale))
        ties = keys == border
        ranks = tl.cumsum(ties.to(tl.int32), axis=0)
        weights = tl.where((keys < border) | (ties & (ranks <= room)), weights_of(keys), 0.0)
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
