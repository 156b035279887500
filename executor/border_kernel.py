"""Where top-k, top-p and min-p end, without sorting a row: the border of each row, in Triton.

Owns the search. For words see `sampling_kernels` and `split_kernel`; called by `cuda_sampler`
between the split of the tiles and the draw.

The border is the smallest key at which a sum over the keys up to it reaches a target: the number of
tokens, for top-k; their weight, for top-p. With the sums of the middle it is found exactly if it is
one of the candidates. If it lies in the middle or the tail instead, the row is sampled anew there,
for another round of splitting and searching. In the last round all of that part is the bracket, so
that every row ends, however odd it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.executor.sampling_kernels import (
    BEHIND,
    BORDER,
    ROOM,
    SEAT_COLUMN,
    STATE_WORDS,
    doubles_of,
    keys_of,
    seat_float,
    weights_of,
)
from gapless.executor.split_kernel import (
    DONE,
    FIND_TOP_P,
    FROM,
    HIGH,
    LOW,
    MIN_P,
    STAGE,
    TO,
    TOP,
    TOP_K,
    TOP_P,
    WEIGH,
    min_p_border,
    parts_of,
    proposed,
    split,
    store_split,
)

STRIP = tl.constexpr(2048)
"""Candidates that are looked at together."""
CHUNK = tl.constexpr(64)
"""Of each tile, where it is done tile by tile."""


@triton.jit
def _gathered(parts, TILE: tl.constexpr, TILES: tl.constexpr):
    """Moves the tiles' candidates together, in order, as some tiles have many; their number."""
    counts, candidates = parts[1], parts[2]
    tiles = tl.arange(0, TILES)
    held = tl.load(counts + TILES + tiles)
    starts = counts + 2 * TILES
    tl.store(starts + tiles, tl.cumsum(held, axis=0) - held)
    total = tl.sum(held, axis=0)
    tl.debug_barrier()  # what one thread wrote, others read now
    first = tl.zeros([], tl.int32)
    while first < total:
        places = first + tl.arange(0, STRIP)
        tile = places * 0
        step = tl.zeros([], tl.int32) + TILES // 2
        while step > 0:
            tile += tl.where(tl.load(starts + tile + step) <= places, step, 0)
            step //= 2
        inside = places < total
        slots = places - tl.load(starts + tile)
        found = tl.load(candidates + tile * TILE + slots, mask=inside, other=0.0)
        tl.debug_barrier()  # none is further in front than where it goes
        tl.store(candidates + places, found, mask=inside)
        tl.debug_barrier()
        first += STRIP
    return total


@triton.jit
def _keys_from(candidates, total, first):
    """Keys of a strip of the candidates."""
    places = first + tl.arange(0, STRIP)
    inside = places < total
    return tl.where(inside, keys_of(tl.load(candidates + places, mask=inside, other=0.0)), BEHIND)


@triton.jit
def _reaching(candidates, total, ends, middle, high, target, by_mass):
    """The first candidate's key up to which the sum reaches the target.

    `ends` are those of top, middle and bracket; sums behind the top include that of the `middle`.
    The key returned is no candidate's where the border is none: that behind the top if it is in the
    middle, `high` if it is in the tail.
    """
    top, first = ends[0], tl.maximum(ends[0], ends[1])
    low = tl.zeros([], tl.int32) - 1
    below = tl.zeros([], tl.float64)
    above = below - 1.0
    turn = low + 1
    while high - low > 1:
        # Where the middle ends, then where it begins: so the part is known. Then a straight line
        # between the ends, which is mostly near, and their mean, which always comes nearer.
        pivot = low + (high - low) // 2
        if (above > below) & (turn % 2 == 0):
            share = (target - below) / (above - below)
            pivot = low + (share * (high - low).to(tl.float64)).to(tl.int32)
        pivot = tl.where((turn == 1) & (low < top), top, pivot)
        pivot = tl.where(turn == 0, first, pivot)
        pivot = tl.minimum(tl.maximum(pivot, low + 1), high - 1)
        sums = tl.zeros([STRIP], tl.float64)
        before = tl.zeros([STRIP], tl.int32) - 1
        after = tl.zeros([STRIP], tl.int32)
        place = tl.zeros([], tl.int32)
        while place < total:
            keys = _keys_from(candidates, total, place)
            within = keys <= pivot
            values = tl.where(by_mass, weights_of(keys), 1.0)
            sums += doubles_of(tl.where(within, values, 0.0))
            before = tl.maximum(before, tl.where(within, keys, -1))
            after = tl.maximum(after, tl.where(within, 0, BEHIND - keys))
            place += STRIP
        # The bracket ends at candidates, so that it takes few turns.
        before, after = tl.split(tl.max(tl.join(before, after), axis=0))
        behind_top = pivot > top
        reached = tl.sum(sums, axis=0) + tl.where(behind_top, middle, 0.0)
        if reached >= target:
            high = tl.where(behind_top, tl.maximum(before, top + 1), before)
            above = reached
        else:
            # The middle, which has no candidates, begins behind the top.
            low = tl.where(behind_top, BEHIND - after - 1, tl.minimum(BEHIND - after - 1, top))
            below = reached
        turn += 1
    return high


@triton.jit
def _sums_at(candidates, total, key):
    """Of the candidates: the number and the weight of those before `key`, and the number at it."""
    counts = tl.zeros([STRIP], tl.int32)
    masses = tl.zeros([STRIP], tl.float64)
    ties = tl.zeros([STRIP], tl.int32)
    first = tl.zeros([], tl.int32)
    while first < total:
        keys = _keys_from(candidates, total, first)
        before = keys < key
        counts += before.to(tl.int32)
        masses += doubles_of(tl.where(before, weights_of(keys), 0.0))
        ties += (keys == key).to(tl.int32)
        first += STRIP
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0), tl.sum(ties, axis=0)


@triton.jit
def _weigh_tiles(parts, border, with_middle, TILE: tl.constexpr, TILES: tl.constexpr):
    """Stores for each tile the weight below the border and the number of tokens at it."""
    masses, counts, candidates = parts
    tiles = tl.arange(0, TILES)
    mass = tl.where(with_middle, tl.load(masses + tiles), 0.0)
    ties = tl.zeros([TILES], tl.int32)
    held = tl.load(counts + TILES + tiles)
    starts = tl.load(counts + 2 * TILES + tiles)
    first = tl.zeros([], tl.int32)
    while first < tl.max(held, axis=0):
        slots = first + tl.arange(0, CHUNK)[None, :]
        inside = slots < held[:, None]
        places = starts[:, None] + slots
        keys = keys_of(tl.load(candidates + places, mask=inside, other=float("inf")))
        below = inside & (keys < border)
        mass += tl.sum(doubles_of(tl.where(below, weights_of(keys), 0.0)), axis=1)
        ties += tl.sum((inside & (keys == border)).to(tl.int32), axis=1)
        first += CHUNK
    tl.debug_barrier()  # all have read the middle's
    tl.store(masses + tiles, mass)
    tl.store(counts + tiles, ties)


@triton.jit
def _room(missing, weight, ties):
    """The fewest of `ties` tokens of `weight` that have the `missing` weight together."""
    room = tl.minimum(missing / weight, ties.to(tl.float64)).to(tl.int32)
    room = tl.where(room.to(tl.float64) * weight < missing, room + 1, room)
    return tl.minimum(tl.maximum(room, 1), ties)


@triton.jit
def _miss(row, state, ends, part, key, sums, by_mass, LAST: tl.constexpr, SAMPLE: tl.constexpr):
    """Where the border is if not among the candidates, and how to split next.

    `ends` are those of top, middle and bracket, `part` those of the keys in question, `key` is what
    `_reaching` found, and `sums` are the target, that before `key`, of the middle, and of the row.
    """
    top, first, last = ends
    low, high = part
    target, before, held, whole = sums
    end = tl.maximum(top, last)
    if (key == top + 1) & (end > top):
        # Sums in another order might have said that the border is behind `first`.
        low = tl.where(first > low, tl.maximum(low, top), -1)
        high = first
    else:
        low = end
        before += held
        held = whole - before
    if LAST:
        first, last = low, high
    else:
        share = ((target - before) / held).to(tl.float32)
        share = tl.minimum(tl.maximum(share, 0.0), 1.0)
        top, first, last = proposed(row, low, high, share, by_mass, SAMPLE)
    tl.store(state + LOW, low)
    tl.store(state + HIGH, high)
    store_split(state, -1, first, last)


@triton.jit
def _search(
    row,
    limits,
    state,
    kept_mass,
    parts,
    total,
    LAST: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Looks for the border among the candidates: of top-k, then of top-p in what that leaves.

    Returns:
        The row's stage, border and room.
    """
    top_k, top_p = limits[0], limits[1]
    masses, counts, candidates = parts
    tiles = tl.arange(0, TILES)
    middle_count = tl.sum(tl.load(counts + tiles), axis=0)
    middle_mass = tl.sum(tl.load(masses + tiles), axis=0)
    kept = tl.load(kept_mass)
    if kept < 0.0:
        kept = tl.sum(tl.load(masses + TILES + tiles), axis=0)
    ends = tl.load(state + TOP), tl.load(state + FROM), tl.load(state + TO)
    low, high = tl.load(state + LOW), tl.load(state + HIGH)
    stage = tl.load(state + STAGE)
    border, room = tl.load(state + BORDER), tl.load(state + ROOM)
    ceiling = tl.maximum(ends[0], ends[2]) + 1
    searching = stage < WEIGH
    while searching:
        by_mass = stage == FIND_TOP_P
        target = tl.where(by_mass, top_p.to(tl.float64) * kept, top_k.to(tl.float64))
        middle = tl.where(by_mass, middle_mass, middle_count.to(tl.float64))
        key = _reaching(candidates, total, ends, middle, ceiling, target, by_mass)
        count, mass, ties = _sums_at(candidates, total, key)
        before = tl.where(by_mass, mass, count.to(tl.float64))
        if ties > 0:
            behind_top = key > ends[0]
            mass += tl.where(behind_top, middle_mass, 0.0)
            weight = weights_of(key).to(tl.float64)
            border, ceiling, high = key, key, key
            low = low * 0 - 1
            if by_mass:
                room = _room(target - mass, weight, ties)
                stage = stage * 0 + WEIGH
            else:
                room = top_k - count - tl.where(behind_top, middle_count, 0)
                kept = mass + room.to(tl.float64) * weight
                stage = tl.where(top_p < 1.0, FIND_TOP_P, WEIGH)
            searching = stage < WEIGH
        else:
            sums = (target, before, middle, tl.where(by_mass, kept, row[1] + 0.0 * kept))
            _miss(row, state, ends, (low, high), key, sums, by_mass, LAST, SAMPLE)
            searching = searching & False
    tl.store(kept_mass, kept)
    return stage, border, room


@triton.jit
def _advance(
    row,
    limits,
    state,
    kept_mass,
    parts,
    LAST: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Does for a row what its split permits, and says how to split next; returns its stage."""
    total = _gathered(parts, TILE, TILES)
    top, first, last = tl.load(state + TOP), tl.load(state + FROM), tl.load(state + TO)
    stage, border, room = _search(row, limits, state, kept_mass, parts, total, LAST, SAMPLE, TILES)
    if stage == WEIGH:
        least = min_p_border(limits[2])
        room = tl.where(least <= border, 0, room)
        border = tl.minimum(least, border)
        end = tl.maximum(top, last)
        if (border <= top) | ((border > first) & (border <= tl.where(room > 0, end, end + 1))):
            _weigh_tiles(parts, border, border > top, TILE, TILES)
            stage = stage * 0 + DONE
        else:
            tl.debug_barrier()  # all have read the present split
            store_split(state, -1, border - 1, border)
    tl.debug_barrier()
    tl.store(state + STAGE, stage)
    tl.store(state + BORDER, border)
    tl.store(state + ROOM, room)
    return stage


@triton.jit
def find_borders(
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
    masses,
    counts,
    candidates,
    LAST: tl.constexpr,
    SAMPLE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Finds each row's border, and the weight below it and tokens at it of each tile; or goes on.

    Takes `split_tiles`' sums. Grid (rows,).
    """
    index = tl.program_id(0)
    scale = tl.load(scale_in + index)
    if scale > 0.0:
        state = states + index * STATE_WORDS
        if tl.load(state + STAGE) != DONE:
            seat = tl.load(rows + SEAT_COLUMN * row_max + index)
            limits = (
                tl.load(table + seat.to(tl.int64) * seat_words + TOP_K),
                seat_float(table, seat_words, seat, TOP_P),
                seat_float(table, seat_words, seat, MIN_P),
            )
            row = (logits + index.to(tl.int64) * VOCAB, VOCAB, tl.load(best_in + index), scale)
            parts = parts_of(index, VOCAB, masses, counts, candidates, TILE, TILES)
            kept_mass = kept_masses + index
            again = True
            while again:
                stage = _advance(row, limits, state, kept_mass, parts, LAST, SAMPLE, TILE, TILES)
                again = (stage != DONE) & LAST
                if again:
                    tl.debug_barrier()  # what one thread wrote, others read now
                    for tile in range(tl.cdiv(VOCAB, TILE)):
                        split(row, state, parts, tile, TILE, TILES)
                    tl.debug_barrier()
