"""Step slots and result slots: what is written is what is read, and broken promises are caught."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.protos import rendezvous
from gapless.protos.messages import Epoch, StepNumber
from gapless.protos.slots import (
    ALIGNMENT_BYTES,
    NO_CARRY,
    SLOT_COUNT,
    Features,
    Frame,
    FrameLayout,
    FrameSlots,
    Result,
    ResultLayout,
    ResultSlots,
    RowFault,
    Rows,
)

LAYOUT = FrameLayout(row_max=9, token_max=40, assignment_max=12)
EPOCH = Epoch(3)


def int32s(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


@st.composite
def frames(draw: st.DrawFn, step: int = 0) -> Frame:
    """Any frame that fits LAYOUT and keeps a writer's promises."""
    row_count = draw(st.integers(1, LAYOUT.row_max))
    seats = draw(st.lists(st.integers(1, 500), min_size=row_count, max_size=row_count, unique=True))
    room = LAYOUT.token_max - row_count
    lengths = []
    for _ in range(row_count):
        extra = draw(st.integers(0, room))
        room -= extra
        lengths.append(1 + extra)
    before = draw(
        st.lists(st.integers(0, 2**20), min_size=row_count, max_size=row_count)
    )  # positions computed by earlier steps
    carry = [
        draw(st.integers(NO_CARRY, LAYOUT.row_max - 1)) if length == 1 else NO_CARRY
        for length in lengths
    ]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    token_count = sum(lengths)
    positions = [
        start + offset
        for start, length in zip(before, lengths, strict=True)
        for offset in range(length)
    ]
    triples = draw(
        st.lists(
            st.tuples(st.integers(1, 500), st.integers(0, 9000), st.integers(-(2**31), 2**31 - 1)),
            max_size=LAYOUT.assignment_max,
        )
    )
    return Frame(
        epoch=EPOCH,
        step=StepNumber(step),
        rows=Rows(
            seat=int32s(seats),
            carry_row=int32s(carry),
            query_start=int32s(starts),
            query_length=int32s(lengths),
            context_length=int32s([a + b for a, b in zip(before, lengths, strict=True)]),
            result_count=int32s(
                draw(st.lists(st.sampled_from([0, 1]), min_size=row_count, max_size=row_count))
            ),
        ),
        token_ids=int32s(
            draw(st.lists(st.integers(0, 2**31 - 1), min_size=token_count, max_size=token_count))
        ),
        positions=int32s(positions),
        assignments=np.array(triples, dtype=np.int32).reshape(-1, 3),
        features=draw(st.builds(Features, st.integers(0, 15))),
        published_ns=draw(st.integers(0, 2**63 - 1)),
    )


def assert_same(found: Frame, expected: Frame) -> None:
    for field in dataclasses.fields(Rows):
        np.testing.assert_array_equal(
            getattr(found.rows, field.name), getattr(expected.rows, field.name), field.name
        )
    for name in ("token_ids", "positions", "assignments"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    for name in ("epoch", "step", "features", "published_ns"):
        assert getattr(found, name) == getattr(expected, name), name


@settings(max_examples=60, deadline=None)
@given(st.lists(frames(), min_size=2, max_size=6))
def test_frames_come_back_from_both_slots(drawn: list[Frame]) -> None:
    slots = FrameSlots(LAYOUT, bytearray(LAYOUT.size_bytes))
    written = [
        dataclasses.replace(frame, step=StepNumber(step)) for step, frame in enumerate(drawn)
    ]
    for earlier, frame in zip([None, *written], written, strict=False):
        frame.check()
        slots.write(frame)
        found = slots.read(EPOCH, frame.step)
        found.check()
        assert_same(found, frame)
        if earlier is not None:  # the other slot still holds the step before
            assert_same(slots.read(EPOCH, earlier.step), earlier)


@settings(max_examples=20, deadline=None)
@given(frame=frames(step=7))
def test_frames_cross_a_mapped_region(
    tmp_path_factory: pytest.TempPathFactory, frame: Frame
) -> None:
    path = rendezvous.frames_path(tmp_path_factory.getbasetemp(), EPOCH)
    ours = FrameSlots(LAYOUT, memoryview(rendezvous.create_region(path, LAYOUT.size_bytes)))
    theirs = FrameSlots(LAYOUT, memoryview(rendezvous.open_region(path, LAYOUT.size_bytes)))
    ours.write(frame)
    assert_same(theirs.read(EPOCH, frame.step), frame)


def a_frame() -> Frame:
    """Three rows: a decode row that carries, a chunk of four tokens, a literal decode row."""
    return Frame(
        epoch=EPOCH,
        step=StepNumber(4),
        rows=Rows(
            seat=int32s([2, 5, 1]),
            carry_row=int32s([1, NO_CARRY, NO_CARRY]),
            query_start=int32s([0, 1, 5]),
            query_length=int32s([1, 4, 1]),
            context_length=int32s([10, 4, 3]),
            result_count=int32s([1, 0, 1]),
        ),
        token_ids=int32s([0, 11, 12, 13, 14, 7]),
        positions=int32s([9, 0, 1, 2, 3, 2]),
        assignments=np.zeros((0, 3), np.int32),
        features=Features.NONE,
        published_ns=1,
    )


def changed(column: str, values: list[int]) -> Frame:
    frame = a_frame()
    if column == "token_ids":
        return dataclasses.replace(frame, token_ids=int32s(values))
    if column == "positions":
        return dataclasses.replace(frame, positions=int32s(values))
    return dataclasses.replace(
        frame, rows=dataclasses.replace(frame.rows, **{column: int32s(values)})
    )


def test_the_example_keeps_its_promises() -> None:
    a_frame().check()


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("seat", []),
        ("seat", [2, 0, 1]),
        ("seat", [2, 5, 2]),
        ("query_length", [1, 0, 1]),
        ("context_length", [10, 3, 3]),
        ("query_start", [1, 2, 6]),
        ("query_start", [0, 2, 5]),
        ("token_ids", [0, 11, 12, 13, 14]),
        ("positions", [9, 0, 1, 2, 3]),
        ("carry_row", [-2, NO_CARRY, NO_CARRY]),
        ("carry_row", [1, 0, NO_CARRY]),
        ("result_count", [1, 2, 1]),
        ("result_count", [1, -1, 1]),
        ("positions", [8, 0, 1, 2, 3, 2]),
    ],
)
def test_check_catches_a_broken_promise(column: str, values: list[int]) -> None:
    with pytest.raises(AssertionError):
        changed(column, values).check()


def test_a_slot_without_the_frame_is_noticed() -> None:
    slots = FrameSlots(LAYOUT, bytearray(LAYOUT.size_bytes))
    with pytest.raises(AssertionError, match="no frame in the slot"):
        slots.read(EPOCH, StepNumber(4))
    slots.write(a_frame())
    with pytest.raises(AssertionError):
        slots.read(EPOCH, StepNumber(6))
    with pytest.raises(AssertionError):
        slots.read(Epoch(EPOCH + 1), StepNumber(4))


@pytest.mark.parametrize(
    "layout",
    [
        FrameLayout(row_max=2, token_max=40, assignment_max=12),
        FrameLayout(row_max=9, token_max=5, assignment_max=12),
        FrameLayout(row_max=9, token_max=40, assignment_max=0),
    ],
)
def test_a_frame_that_does_not_fit_is_not_written(layout: FrameLayout) -> None:
    slots = FrameSlots(layout, bytearray(layout.size_bytes))
    frame = dataclasses.replace(a_frame(), assignments=np.ones((1, 3), np.int32))
    with pytest.raises(AssertionError):
        slots.write(frame)


@given(
    row_max=st.integers(1, 5000), token_max=st.integers(1, 40000), assignments=st.integers(0, 99)
)
def test_slots_are_page_aligned_and_parts_do_not_overlap(
    row_max: int, token_max: int, assignments: int
) -> None:
    layout = FrameLayout(row_max, token_max, assignments)
    assert layout.slot_bytes % ALIGNMENT_BYTES == 0
    assert layout.size_bytes == SLOT_COUNT * layout.slot_bytes
    assert layout.rows_at < layout.tokens_at < layout.assignments_at
    assert layout.assignments_at + 12 * assignments <= layout.slot_bytes
    results = ResultLayout(row_max)
    assert results.slot_bytes % ALIGNMENT_BYTES == 0
    assert results.faults_at + 4 * row_max <= results.slot_bytes


def a_result(step: int, tokens: list[int], faults: list[int]) -> Result:
    return Result(
        epoch=EPOCH,
        step=StepNumber(step),
        tokens=int32s(tokens),
        faults=int32s(faults),
        accepted_ns=10 * step,
        started_ns=10 * step + 1,
        finished_ns=10 * step + 2,
    )


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 2**31 - 1), st.sampled_from(list(RowFault))),
            min_size=1,
            max_size=9,
        ),
        min_size=1,
        max_size=5,
    )
)
def test_results_come_back(steps: list[list[tuple[int, RowFault]]]) -> None:
    layout = ResultLayout(row_max=9)
    slots = ResultSlots(layout, bytearray(layout.size_bytes))
    for step, rows in enumerate(steps):
        result = a_result(step, [token for token, _ in rows], [fault for _, fault in rows])
        slots.write(result)
        found = slots.read(EPOCH, StepNumber(step))
        np.testing.assert_array_equal(found.tokens, result.tokens)
        np.testing.assert_array_equal(found.faults, result.faults)
        assert (found.accepted_ns, found.started_ns, found.finished_ns) == (
            result.accepted_ns,
            result.started_ns,
            result.finished_ns,
        )


def test_a_slot_without_the_result_is_noticed() -> None:
    layout = ResultLayout(row_max=2)
    slots = ResultSlots(layout, bytearray(layout.size_bytes))
    with pytest.raises(AssertionError, match="no result in the slot"):
        slots.read(EPOCH, StepNumber(0))
    slots.write(a_result(2, [1], [0]))
    with pytest.raises(AssertionError):
        slots.read(EPOCH, StepNumber(0))
    with pytest.raises(AssertionError):
        slots.write(a_result(3, [1, 2, 3], [0, 0, 0]))


def test_both_results_of_a_pipeline_stand_side_by_side(tmp_path: Path) -> None:
    layout = ResultLayout(row_max=2)
    path = rendezvous.results_path(tmp_path, EPOCH)
    ours = ResultSlots(layout, memoryview(rendezvous.create_region(path, layout.size_bytes)))
    theirs = ResultSlots(layout, memoryview(rendezvous.open_region(path, layout.size_bytes)))
    ours.write(a_result(8, [5, 6], [0, 0]))
    ours.write(a_result(9, [7], [RowFault.NOT_FINITE]))
    assert theirs.read(EPOCH, StepNumber(8)).tokens.tolist() == [5, 6]
    assert theirs.read(EPOCH, StepNumber(9)).faults.tolist() == [RowFault.NOT_FINITE]


def test_a_device_sees_the_same_memory() -> None:
    """Whole slots and result columns, as a device pins and fills them, are no copies."""
    slots = FrameSlots(LAYOUT, bytearray(LAYOUT.size_bytes))
    frame = dataclasses.replace(a_frame(), step=StepNumber(5))
    slots.write(frame)
    assert not slots.slot_bytes(0).any()
    whole = slots.slot_bytes(1)
    assert len(whole) == LAYOUT.slot_bytes
    pairs = whole[LAYOUT.tokens_at :][: 8 * frame.token_count].view(np.int32).reshape(-1, 2)
    np.testing.assert_array_equal(pairs[:, 0], frame.token_ids)
    np.testing.assert_array_equal(pairs[:, 1], frame.positions)
    layout = ResultLayout(row_max=2)
    results = ResultSlots(layout, bytearray(layout.size_bytes))
    results.write(a_result(2, [5, 6], [0, 0]))
    landing = results.landing(0)
    assert landing.tolist() == [0, 0, 0, 0, 5, 6, 0, 0], "two stamps, tokens, faults"
    landing[5] = 9
    assert results.read(EPOCH, StepNumber(2)).tokens.tolist() == [5, 9]
    assert len(results.slot_bytes(1)) == layout.slot_bytes
