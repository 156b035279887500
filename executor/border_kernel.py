"""Where top-k and top-p end, without sorting a row: the border of each row, in Triton.

Owns the search. For words see `sampling_kernels`; called by `cuda_sampler` between the best of the
rows and their weights.

The border is the smallest key at which a sum over the keys up to it reaches a target: the number of
tokens, for top-k; their weight, for top-p. One program a row keeps a bracket ``(low, high]`` that
holds the border, with exact sums at both ends:

1. While the bracket holds more tokens than there is room for candidates, a sample of the row
   proposes keys, and one pass over the row finds the sums at them. One pass is the rule, as a
   sample says well where a quantile is. From the second pass on the middle of the bracket is among
   the keys, so that no row, however odd, takes more than some thirty passes.
2. The keys in the bracket are copied to the row's candidates.
3. There, in registers, the bracket is halved until it holds one key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.executor.sampling_kernels import (
    INFINITE_KEY,
    NO_KEY,
    SEAT_COLUMN,
    keys_of,
    seat_float,
    weights_of,
)
from gapless.protos import seats

TOP_P = tl.constexpr(seats.TOP_P)
TOP_K = tl.constexpr(seats.TOP_K)
RESOLUTION = tl.constexpr(1 << 14)
"""Keys of a sample are told apart to within this: 2**-9 of the distance."""


@triton.jit
def _both(count, mass):
    """The sums over all lanes in one reduction, which costs more than its arithmetic."""
    count, mass = tl.split(tl.sum(tl.join(count.to(tl.float64), mass), axis=0))
    return count.to(tl.int32), mass


@triton.jit
def _lane_sums(keys, weights, pivot):
    """Of the keys up to `pivot`, in each lane: their number and their weight."""
    within = keys <= pivot
    count = tl.sum(within.to(tl.int32), axis=1)
    return count, tl.sum(tl.where(within, weights, 0.0), axis=1)


@triton.jit
def _sums(keys, weights, pivot):
    """Of the keys up to `pivot`: their number and their weight."""
    count, mass = _lane_sums(keys, weights, pivot)
    return _both(count, mass)


@triton.jit
def _row_sums(row, pivots, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """One pass over the row: number and weight of the keys up to each of four pivots."""
    logits, vocab, best, scale = row
    places = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    count_0 = tl.zeros([LANES], tl.int32)
    count_1, count_2, count_3 = count_0, count_0, count_0
    mass_0 = tl.zeros([LANES], tl.float64)
    mass_1, mass_2, mass_3 = mass_0, mass_0, mass_0
    for start in range(0, vocab, LANES * WIDTH):
        keys = keys_of(logits, start + places, vocab, best, scale)
        weights = weights_of(keys).to(tl.float64)
        count, mass = _lane_sums(keys, weights, pivots[0])
        count_0, mass_0 = count_0 + count, mass_0 + mass
        count, mass = _lane_sums(keys, weights, pivots[1])
        count_1, mass_1 = count_1 + count, mass_1 + mass
        count, mass = _lane_sums(keys, weights, pivots[2])
        count_2, mass_2 = count_2 + count, mass_2 + mass
        count, mass = _lane_sums(keys, weights, pivots[3])
        count_3, mass_3 = count_3 + count, mass_3 + mass
    return (
        _both(count_0, mass_0),
        _both(count_1, mass_1),
        _both(count_2, mass_2),
        _both(count_3, mass_3),
    )


@triton.jit
def _proposed(row, low, high, share, by_mass, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Three keys of ``(low, high]``, from a sample of the row.

    The first is likely to have nearly as many tokens before it as there is room for candidates.
    The others are likely to enclose the border, which has the `share` of what the bracket holds
    before it.
    """
    logits, vocab, best, scale = row
    # Runs of four ids at equal distances; four, as the row's start is aligned to so many.
    runs = tl.arange(0, LANES) * (4 * (vocab // (4 * LANES)))
    places = runs[:, None] + tl.arange(0, 4)[None, :]
    keys = keys_of(logits, places, vocab, best, scale)
    inside = (keys > low) & (keys <= high)
    weights = tl.where(inside, tl.where(by_mass, weights_of(keys), 1.0), 0.0)
    total = tl.sum(tl.sum(weights, axis=1), axis=0)
    squares = tl.sum(tl.sum(weights * weights, axis=1), axis=0)
    # Twice the deviation, or a little more, of the sample's sum from the row's.
    margin = 2.0 * tl.sqrt((1.0 - share) * squares)
    lower = share * total - margin
    upper = share * total + margin
    rank = 0.6 * (LANES * WIDTH) * (4 * LANES) / vocab
    first, second, third = low, low, low
    width = high - low
    while width > RESOLUTION:
        width = (width + 1) // 2
        number = tl.sum((inside & (keys <= first + width)).to(tl.float32), axis=1)
        below = tl.sum(tl.where(keys <= second + width, weights, 0.0), axis=1)
        above = tl.sum(tl.where(keys <= third + width, weights, 0.0), axis=1)
        sums = tl.sum(tl.join(tl.join(number, below), tl.join(above, above)), axis=0)
        number_below, above_twice = tl.split(sums)
        number, below = tl.split(number_below)
        above, above = tl.split(above_twice)
        first = tl.where(number >= rank, first, first + width)
        second = tl.where(below >= lower, second, second + width)
        third = tl.where(above >= upper, third, third + width)
    return tl.minimum(first + width, high), second, tl.minimum(third + width, high)


@triton.jit
def _moved(low, high, pivot, sums, target, by_mass):
    """The bracket, ends and sums, after the sums at `pivot` are known."""
    low_key, low_count, low_mass = low
    high_key, high_count, high_mass = high
    count, mass = sums
    reached = tl.where(by_mass, mass, count.to(tl.float64)) >= target
    is_high = reached & (pivot <= high_key)
    is_low = (reached == 0) & (pivot > low_key)
    return (
        (
            tl.where(is_low, pivot, low_key),
            tl.where(is_low, count, low_count),
            tl.where(is_low, mass, low_mass),
        ),
        (
            tl.where(is_high, pivot, high_key),
            tl.where(is_high, count, high_count),
            tl.where(is_high, mass, high_mass),
        ),
    )


@triton.jit
def _bracketed(
    row,
    low,
    high,
    target,
    share,
    by_mass,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Passes over the row until the bracket holds few tokens, or one key.

    A negative target is not known yet: then it is the `share` of the weight up to `high`.
    """
    while ((high[1] - low[1] > LANES * WIDTH) | (target < 0.0)) & (high[0] - low[0] > 1):
        unknown = target < 0.0
        if not unknown:
            held = tl.where(by_mass, high[2] - low[2], (high[1] - low[1]).to(tl.float64))
            reached = tl.where(by_mass, low[2], low[1].to(tl.float64))
            share = ((target - reached) / held).to(tl.float32)
            share = tl.minimum(tl.maximum(share, 0.0), 1.0)
        first, second, third = _proposed(row, low[0], high[0], share, by_mass, LANES, WIDTH)
        fourth = tl.where(unknown, high[0], low[0] + (high[0] - low[0]) // 2)
        sums = _row_sums(row, (first, second, third, fourth), LANES, WIDTH)
        if unknown:
            target = share * sums[3][1]
        low, high = _moved(low, high, first, sums[0], target, by_mass)
        low, high = _moved(low, high, second, sums[1], target, by_mass)
        low, high = _moved(low, high, third, sums[2], target, by_mass)
        low, high = _moved(low, high, fourth, sums[3], target, by_mass)
    return low, high, target


@triton.jit
def _copied(row, low, high, candidates, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Copies the keys of ``(low, high]`` to `candidates`; their number."""
    logits, vocab, best, scale = row
    places = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    copied = tl.zeros([], tl.int32)
    for start in range(0, vocab, LANES * WIDTH):
        keys = keys_of(logits, start + places, vocab, best, scale)
        inside = (keys > low) & (keys <= high)
        numbers = inside.to(tl.int32)
        of_lanes = tl.sum(numbers, axis=1)
        before = tl.cumsum(of_lanes, axis=0) - of_lanes
        slots = copied + before[:, None] + tl.cumsum(numbers, axis=1) - numbers
        tl.store(candidates + slots, keys, mask=inside)
        copied += tl.sum(of_lanes, axis=0)
    tl.debug_barrier()  # what one thread wrote, others read now
    return copied


@triton.jit
def _narrowed(
    row, low, high, target, by_mass, candidates, LANES: tl.constexpr, WIDTH: tl.constexpr
):
    """The bracket narrowed to one key, among the candidates."""
    copied = _copied(row, low[0], high[0], candidates, LANES, WIDTH)
    places = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    keys = tl.load(candidates + places, mask=places < copied, other=NO_KEY)
    weights = weights_of(keys).to(tl.float64)
    start = low
    while high[0] - low[0] > 1:
        middle = low[0] + (high[0] - low[0]) // 2
        count, mass = _sums(keys, weights, middle)
        sums = (start[1] + count, start[2] + mass)
        low, high = _moved(low, high, middle, sums, target, by_mass)
    return low, high


@triton.jit
def _room(missing, weight, ties):
    """The fewest of `ties` tokens of `weight` that have the `missing` weight together."""
    room = tl.minimum(missing / weight, ties.to(tl.float64)).to(tl.int32)
    room = tl.where(room.to(tl.float64) * weight < missing, room + 1, room)
    return tl.minimum(tl.maximum(room, 1), ties)


@triton.jit
def _found(row, top_k, top_p, candidates, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Border and room of a row: of top-k first, then of top-p in what that leaves."""
    none = tl.zeros([], tl.int32)
    nothing = tl.zeros([], tl.float64)
    border = none + INFINITE_KEY
    border_count = none + row[1]
    border_mass = nothing - 1.0
    mass_kept = nothing - 1.0
    room = none
    for search in range(2):
        by_mass = search == 1
        wanted = tl.where(by_mass, top_p < 1.0, (top_k > 0) & (top_k < row[1]))
        if wanted:
            low = (none - 1, none, nothing)
            high = (border, border_count, border_mass)
            target = tl.where(by_mass, top_p.to(tl.float64) * mass_kept, top_k.to(tl.float64))
            low, high, target = _bracketed(row, low, high, target, top_p, by_mass, LANES, WIDTH)
            if high[0] - low[0] > 1:
                low, high = _narrowed(row, low, high, target, by_mass, candidates, LANES, WIDTH)
            border, border_count, border_mass = high
            weight = weights_of(border).to(tl.float64)
            if by_mass:
                room = _room(target - low[2], weight, border_count - low[1])
            else:
                room = top_k - low[1]
                mass_kept = low[2] + room.to(tl.float64) * weight
    return border, room


@triton.jit
def borders(
    logits,
    VOCAB: tl.constexpr,
    rows,
    row_max,
    table,
    seat_words,
    best_in,
    scale_in,
    border_out,
    room_out,
    candidates,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Border of each row that draws and has top-k or top-p, and the room at it.

    `candidates` is int32 ``[rows, LANES * WIDTH]``. Grid (rows,).
    """
    index = tl.program_id(0)
    scale = tl.load(scale_in + index)
    if scale > 0.0:
        seat = tl.load(rows + SEAT_COLUMN * row_max + index)
        top_k = tl.load(table + seat.to(tl.int64) * seat_words + TOP_K)
        top_p = seat_float(table, seat_words, seat, TOP_P)
        row = (logits + index.to(tl.int64) * VOCAB, VOCAB, tl.load(best_in + index), scale)
        place = candidates + index.to(tl.int64) * (LANES * WIDTH)
        border, room = _found(row, top_k, top_p, place, LANES, WIDTH)
        tl.store(border_out + index, border)
        tl.store(room_out + index, room)
