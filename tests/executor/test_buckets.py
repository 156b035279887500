"""Which sizes get graphs, and whose graph serves a step."""

from __future__ import annotations

import numpy as np
import pytest

from gapless.executor.buckets import (
    PROMPT_ROWS_MAX,
    PROMPT_TOKENS_MAX,
    WANTED_MIN,
    Buckets,
    Serving,
    Shape,
)
from gapless.protos.slots import SLOT_COUNT, Features, Frame
from tests.executor.steps import Row, make_frame

ROW_MAX = 72
TOKEN_MAX = 2048


def decoding(row_count: int, step: int = 0, features: Features = Features.NONE) -> Frame:
    return make_frame(
        [Row(seat=1 + row, token_ids=[5], start=7) for row in range(row_count)],
        step=step,
        features=features,
    )


def reading(row_count: int, token_count: int, step: int = 0) -> Frame:
    """One row has a prompt, the others decode."""
    prompt = Row(seat=100, token_ids=[5] * (token_count - row_count + 1), start=0)
    rows = [Row(seat=1 + row, token_ids=[5], start=7) for row in range(row_count - 1)]
    return make_frame([*rows, prompt], step=step)


def started(*, prompts: bool = True, row_max: int = ROW_MAX, token_max: int = TOKEN_MAX) -> Buckets:
    """With the graphs that are made at the start."""
    buckets = Buckets(row_max, token_max, captures=True, captures_prompts=prompts)
    for slot in range(SLOT_COUNT):
        for shape in buckets.at_start():
            buckets.made_forward(slot, shape)
            if shape.only_decodes:
                buckets.made_sample(slot, shape.rows, Features.NONE)
    return buckets


def decodes(rows: int) -> Shape:
    return Shape(rows, rows, only_decodes=True)


def test_the_start_has_powers_of_two_and_all_sizes_with_prompts() -> None:
    shapes = started().at_start()
    assert [shape.rows for shape in shapes if shape.only_decodes] == [72, 64, 32, 16, 8, 4, 2, 1]
    tokens = [shape.tokens for shape in shapes if not shape.only_decodes]
    assert tokens == [1024, 896, 768, 640, 512, 448, 384, 320, 256, 192, 128, 64]
    assert len(started(prompts=False).at_start()) == 8


@pytest.mark.parametrize(
    ("row_count", "rows"),
    [(1, 1), (3, 4), (5, 8), (17, 32), (32, 32), (33, 64), (65, 72), (72, 72)],
)
def test_a_bucket_without_graphs_is_served_by_the_next_larger(row_count: int, rows: int) -> None:
    buckets = started()
    frame = decoding(row_count)
    assert not buckets.wants_own(frame)
    assert buckets.serving(frame) == Serving(decodes(rows), rows)


def test_a_bucket_gets_its_own_graph_when_it_was_wanted_often() -> None:
    buckets = started()
    for step in range(WANTED_MIN):
        assert not buckets.wants_own(decoding(18, step))
    slots = {}
    for step in (WANTED_MIN, WANTED_MIN + 1):
        frame = decoding(18, step)
        assert buckets.wants_own(frame), "each slot has graphs of its own"
        slot = slots[step] = step % SLOT_COUNT
        buckets.made_forward(slot, decodes(24))
        buckets.made_sample(slot, 24, Features.NONE)
        assert not buckets.wants_own(frame)
        assert buckets.serving(frame) == Serving(decodes(24), 24)
    assert set(slots.values()) == set(range(SLOT_COUNT))


def test_a_bucket_that_is_wanted_now_and_then_never_stops_the_device() -> None:
    buckets = started()
    for row_count in (18, 34, 12, 3, 27):
        for step in range(WANTED_MIN // 2):
            assert not buckets.wants_own(decoding(row_count, step))


def test_what_another_sample_graph_was_wanted_for_does_not_count() -> None:
    """A prompt's shape is the same for all row counts, and a bucket's for all features."""
    buckets = started()
    for slot in range(SLOT_COUNT):
        buckets.made_sample(slot, ROW_MAX, Features.RANDOM)
    for step in range(WANTED_MIN):
        assert not buckets.wants_own(reading(18, 70, step))
        assert not buckets.wants_own(decoding(18, step))
    assert buckets.wants_own(reading(18, 70))
    assert not buckets.wants_own(reading(34, 70))
    assert buckets.wants_own(decoding(18))
    assert not buckets.wants_own(decoding(18, features=Features.RANDOM))


@pytest.mark.parametrize(
    ("row_max", "token_max"),
    [(1, 20), (2, 64), (3, 20), (3, 1024), (5, 40), (13, 65), (64, 100), (64, 1000), (65, 950)],
)
def test_every_step_finds_graphs_that_hold_it_and_are_no_larger_than_a_slot(
    row_max: int, token_max: int
) -> None:
    buckets = started(row_max=row_max, token_max=token_max)
    for row_count in range(1, row_max + 1):
        frames = [decoding(row_count)]
        if row_count <= PROMPT_ROWS_MAX:
            longest = min(token_max, PROMPT_TOKENS_MAX)
            frames += [reading(row_count, count) for count in (row_count + 1, longest)]
        for frame in frames:
            serving = buckets.serving(frame)
            assert serving is not None
            assert row_count <= serving.sample_rows <= row_max
            assert row_count <= serving.forward.rows <= row_max
            assert frame.token_count <= serving.forward.tokens <= token_max


def test_features_without_any_sample_graph_get_theirs_at_once() -> None:
    buckets = started()
    frame = decoding(18, features=Features.BIAS)
    assert buckets.wants_own(frame)
    buckets.made_forward(0, decodes(24))
    buckets.made_sample(0, 24, Features.BIAS)
    assert buckets.serving(frame) == Serving(decodes(24), 24)


def test_prompts_have_graphs_up_to_some_tokens_and_rows() -> None:
    buckets = started()
    few = reading(row_count=3, token_count=70)
    assert buckets.serving(few) == Serving(Shape(PROMPT_ROWS_MAX, 128, only_decodes=False), 4)
    for frame in (reading(PROMPT_ROWS_MAX + 1, 70), reading(3, PROMPT_TOKENS_MAX + 1)):
        assert buckets.serving(frame) is None
        assert not buckets.wants_own(frame)


def test_what_is_not_captured() -> None:
    nothing = Buckets(ROW_MAX, TOKEN_MAX, captures=False, captures_prompts=False)
    assert nothing.at_start() == []
    assert nothing.shape_of(decoding(1)) is None
    only_decodes = started(prompts=False)
    assert only_decodes.shape_of(reading(3, 70)) is None
    many = np.ones((2 * ROW_MAX + 1, 3), dtype=np.int32)
    frame = make_frame([Row(seat=1, token_ids=[5], start=7)], assignments=many)
    assert only_decodes.shape_of(frame) is None


def test_no_graphs_are_made_for_more_rows_than_a_step_has_tokens() -> None:
    buckets = Buckets(row_max=64, token_max=12, captures=True, captures_prompts=True)
    assert buckets.at_start() == [
        Shape(12, 12, only_decodes=False),
        *(decodes(rows) for rows in (12, 8, 4, 2, 1)),
    ]
