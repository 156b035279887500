"""Traps of overlap on the GPU: each holds with its guard, and fails once the guard is taken out.

A guard is taken out in the test alone, by a patch (a *plant*). What is planted touches decode steps
only where it would otherwise make a kernel read outside its tensors. Copies and steps are made late
by a kernel that spins for a fixed number of cycles, far longer than the host takes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gapless.executor.attention_backends import FA3, FLASHINFER, available_backends
from gapless.executor.device import Landings
from gapless.executor.model import Model
from gapless.protos.messages import StepNumber
from gapless.protos.seats import SCRATCH_SEAT
from gapless.protos.slots import NO_CARRY, Frame, Rows
from tests.gpu.serving import (
    EPOCH,
    CudaServer,
    Oracle,
    Request,
    Tokens,
    head_shape,
    outcome,
    varied_model,
)
from tests.simulation.test_mutations import forget_block_assignments

TIE_BOUND = 0.06
"""Logits this close in float32 may change places in bfloat16."""
LATE_CYCLES = 50_000_000
"""Some thirty milliseconds; a step is enqueued and computed in two or three."""
MARKER = 4095
"""What stands where nobody may read: a valid token, so that reading it does no harm but shows."""
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def model() -> Model:
    return varied_model()


@pytest.fixture(scope="module")
def backend(model: Model) -> str:
    found = available_backends(head_shape(model), windows=False, block_tokens=16)
    if found[0] not in (FLASHINFER, FA3):
        pytest.skip("no attention kernel is installed, so nothing is captured")
    return found[0]


@pytest.fixture(scope="module")
def oracle(model: Model) -> Oracle:
    return Oracle(model)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, MARKER, length).tolist() for length in lengths]


def together(lengths: Sequence[int] = (3, 17, 40, 9), new: int = NEW_TOKENS) -> list[Request]:
    return [Request(prompt, new) for prompt in prompts(lengths)]


@pytest.fixture(scope="module")
def expected(model: Model, backend: str) -> Tokens:
    """What `together()` gives without any trap."""
    tokens = outcome(CudaServer(model, backend=backend, depth=1), together())
    assert not isinstance(tokens, str), tokens
    return tokens


# ---------------------------------------------------------------- what is still on its way


class LateServer(CudaServer):
    """Decode steps, or the copies of their frames, are late; a guard may be missing for them."""

    def __init__(self, model: Model, backend: str, late: str, plant: str, is_wakeful: bool) -> None:
        super().__init__(model, backend=backend, is_wakeful=is_wakeful)
        self._late = self.device._h2d if late == "copy" else self.device._compute
        self._is_armed = False
        self.wakeup_limit_s = 10.0
        device = self.device
        if plant == "compute does not wait for the copy":
            self._skip_if_armed(device._compute, "wait_event")
        elif plant == "the way back does not wait for the step":
            self._skip_if_armed(device._d2h, "wait_event")
        elif plant == "nobody waits for the way back":
            for slot in device._slots:
                self._skip_if_armed(slot.landed, "synchronize")
                self._skip_if_armed(slot.landed, "query", result=True)
        elif plant == "a frame comes before the result of the one in its slot":
            self.core._pipeline._depth = 3
        else:
            assert plant == "", plant

    def _skip_if_armed(self, owner: Any, name: str, result: bool | None = None) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *given: result if self._is_armed else original(*given))

    def publish(self, frame: Frame) -> None:
        self._is_armed = frame.query_length_max == 1
        if self._is_armed:
            with torch.cuda.stream(self._late):
                torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
        # Three in flight is what the device refuses on its own, too.
        flights = self.device._flights
        hidden = [flights.popleft() for _ in range(len(flights) - 1)]
        super().publish(frame)
        flights.extendleft(reversed(hidden))


WAKEFUL = pytest.mark.parametrize("is_wakeful", [False, True])


@WAKEFUL
@pytest.mark.parametrize("late", ["copy", "step"])
def test_late_copies_and_steps_change_nothing(
    model: Model, backend: str, expected: Tokens, late: str, is_wakeful: bool
) -> None:
    assert outcome(LateServer(model, backend, late, "", is_wakeful), together()) == expected


@WAKEFUL
@pytest.mark.parametrize(
    ("late", "plant"),
    [
        ("copy", "compute does not wait for the copy"),
        ("copy", "a frame comes before the result of the one in its slot"),
        ("step", "the way back does not wait for the step"),
        ("step", "nobody waits for the way back"),
    ],
)
def test_without_its_guard_a_late_copy_or_step_shows(
    model: Model, backend: str, expected: Tokens, late: str, plant: str, is_wakeful: bool
) -> None:
    assert outcome(LateServer(model, backend, late, plant, is_wakeful), together()) != expected


# ---------------------------------------------------------------- carry-over

CARRY_PLANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing is carried": lambda rows: torch.full_like(rows, NO_CARRY),
    "all is carried": lambda rows: rows.clamp(min=0),
    "each row carries from its own place": lambda rows: torch.arange(
        len(rows), dtype=rows.dtype, device=rows.device
    ),
}
CARRY_COLUMN = [field.name for field in dataclasses.fields(Rows)].index("carry_row")


def plant_carry(patch: pytest.MonkeyPatch, name: str) -> None:
    """Lets every step, captured or not, find other sources in its slot than its frame names."""
    from gapless.executor.cuda_step import CudaStep

    forward, fault = CudaStep._forward, CARRY_PLANTS[name]

    def planted(step: CudaStep, slot: int, *given: Any) -> None:
        column = step.slots[slot].rows[CARRY_COLUMN]
        column.copy_(fault(column))
        forward(step, slot, *given)

    patch.setattr(CudaStep, "_forward", planted)


class MarkedServer(CudaServer):
    """At depth 1, where each token is known: half of the rows are made to carry theirs over.

    Those have the marker for a literal token; the others find the marker in every row of the step
    before that no row names, real and padded.
    """

    def __init__(self, model: Model, backend: str) -> None:
        super().__init__(model, backend=backend, depth=1)
        self.literal_count = 0
        self._previous: dict[tuple[int, int], int] = {}

    def publish(self, frame: Frame) -> None:
        rows = frame.rows
        carry, token_ids = rows.carry_row.copy(), frame.token_ids.copy()
        for row in range(frame.row_count):
            source = self._previous.get((int(rows.seat[row]), int(rows.context_length[row]) - 1))
            if source is None or int(rows.query_length[row]) != 1:
                continue
            if row % 2:
                carry[row] = source
                token_ids[rows.query_start[row]] = MARKER
            else:
                self.literal_count += 1
        self._mark(StepNumber(frame.step - 1), carry[carry != NO_CARRY])
        self._previous = {
            (int(seat), int(context)): row
            for row, (seat, context) in enumerate(zip(rows.seat, rows.context_length, strict=True))
            if rows.result_count[row]
        }
        marked = dataclasses.replace(rows, carry_row=carry)
        super().publish(dataclasses.replace(frame, rows=marked, token_ids=token_ids))

    def _mark(self, step: int, sources: np.ndarray[Any, Any]) -> None:
        torch.cuda.synchronize()
        sampled = self.step.slots[step % 2].sampled
        kept = sampled.clone()
        sampled.fill_(MARKER)
        named = torch.from_numpy(sources.astype(np.int64)).to(sampled.device)
        sampled[named] = kept[named]
        torch.cuda.synchronize()


def test_marked_rows_are_never_read(model: Model, backend: str, expected: Tokens) -> None:
    server = MarkedServer(model, backend)
    assert outcome(server, together()) == expected
    decoded = len(together()) * (NEW_TOKENS - 1)
    assert server.literal_count == server.carried_count == decoded // 2


@pytest.mark.parametrize("plant", CARRY_PLANTS)
def test_without_the_select_marked_rows_are_read(
    model: Model, backend: str, expected: Tokens, plant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_carry(monkeypatch, plant)
    assert outcome(MarkedServer(model, backend), together()) != expected


class TakeoverServer(CudaServer):
    """Counts rows that belong to another sequence than in the step right before."""

    def __init__(self, model: Model, backend: str) -> None:
        super().__init__(model, backend=backend, row_max=8)
        self.takeover_count = 0
        self._seats: list[int] = []

    def publish(self, frame: Frame) -> None:
        seats = frame.rows.seat.tolist()
        newcomers = (frame.rows.context_length == frame.rows.query_length).tolist()
        before = self._seats + [SCRATCH_SEAT] * len(seats)
        self.takeover_count += sum(
            is_new and SCRATCH_SEAT != old != seat
            for old, seat, is_new in zip(before, seats, newcomers, strict=False)
        )
        self._seats = seats
        super().publish(frame)


@pytest.mark.parametrize("plant", ["", "each row carries from its own place"])
def test_a_row_changes_hands_in_one_cycle(
    model: Model, backend: str, oracle: Oracle, plant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plant:
        plant_carry(monkeypatch, plant)
    lengths = [1 + (7 * index) % 30 for index in range(80)]
    requests = [Request(prompt, 1 + index % 5) for index, prompt in enumerate(prompts(lengths))]
    server = TakeoverServer(model, backend)
    served = outcome(server, requests)
    assert server.takeover_count > 20, server.takeover_count
    assert not isinstance(served, str), served
    shortfalls = [
        oracle.shortfall(request.prompt, tokens)
        for request, tokens in zip(requests, served, strict=True)
    ]
    assert (max(shortfalls) < TIE_BOUND) == (plant == ""), max(shortfalls)


# ---------------------------------------------------------------- idle and wake


def test_waking_with_a_stale_token_shows(
    model: Model, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `test_device` does a thousand times; here the first step after idle carries over."""
    request = together((9,), 2)
    first = outcome(CudaServer(model, backend=backend), request)
    plant_carry(monkeypatch, "each row carries from its own place")
    server = CudaServer(model, backend=backend)
    woken = [server.serve(request) for _ in range(5)]
    server.close()
    assert any(tokens != first for tokens in woken)


def test_a_lost_wake_up_shows(model: Model, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(landings: Landings, landed: StepNumber | Exception) -> None:
        landings._landed.append(landed)

    server = CudaServer(model, backend=backend)
    server.serve(together((9,), 2))
    monkeypatch.setattr(Landings, "tell", tell)
    server.wakeup_limit_s = 1.0
    assert str(outcome(server, together((9,), 2))).startswith("broken: nothing landed")


# ---------------------------------------------------------------- lengths, padding, the last step


@pytest.mark.parametrize("is_planted", [False, True], ids=["guarded", "planted"])
def test_sequences_that_cross_block_borders_together(
    model: Model, backend: str, oracle: Oracle, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_planted:
        forget_block_assignments(monkeypatch)
    requests = [
        Request(prompt, new)
        for prompt in prompts((14, 15, 16, 17, 31, 32, 33))
        for new in (1, 2, 16, 17, 34)
    ]
    server = CudaServer(model, backend=backend, row_max=40)
    served = outcome(server, requests)
    if isinstance(served, str):
        assert is_planted, served
        return
    assert [len(tokens) for tokens in served] == [request.max_new_tokens for request in requests]
    shortfalls = [
        oracle.shortfall(request.prompt, tokens)
        for request, tokens in zip(requests, served, strict=True)
    ]
    assert (max(shortfalls) < TIE_BOUND) == (not is_planted), max(shortfalls)


class MisplacedPadding(CudaServer):
    """Padding writes where the first row's first token stands, not into scratch."""

    def publish(self, frame: Frame) -> None:
        if frame.query_length_max == 1:
            torch.cuda.synchronize()
            column = self.step._seats.layout.blocks_at
            block = int(self.table[int(frame.rows.seat[0]), column])
            self.step._seats._table[SCRATCH_SEAT, column] = block
            torch.cuda.synchronize()
        super().publish(frame)


def test_padding_outside_scratch_shows(model: Model, backend: str) -> None:
    for count, is_padded in ((4, False), (5, True)):
        requests = together([9 + row for row in range(count)])
        tokens = [
            outcome(form(model, backend=backend, depth=1), requests)
            for form in (CudaServer, MisplacedPadding)
        ]
        assert (tokens[0] != tokens[1]) == is_padded, count


@pytest.mark.parametrize("is_planted", [False, True], ids=["guarded", "planted"])
def test_the_last_steps_of_a_device_that_closes_are_delivered(
    model: Model, backend: str, is_planted: bool
) -> None:
    (request,) = together((9,), 2)
    server = CudaServer(model, backend=backend)
    (expected_tokens,) = server.serve([request])
    handle = server.submit(request)
    with torch.cuda.stream(server.device._compute):
        torch.cuda._sleep(5 * LATE_CYCLES)  # type: ignore[no-untyped-call]
    steps = []
    while server.core.can_build() and (frame := server.core.build(time.monotonic())) is not None:
        server.publish(frame)
        steps.append(frame.step)
    assert len(steps) == 2, "prefill and one decode are in flight"
    assert server.tokens[handle] == []
    server.core.drain(time.monotonic())
    if is_planted:
        server.device._flights.clear()
    server.close()
    if is_planted:
        with pytest.raises(AssertionError):
            server.results.read(EPOCH, steps[1])
        return
    delivered = [int(server.results.read(EPOCH, step).tokens[0]) for step in steps]
    assert delivered == expected_tokens
