"""The executor as a process: a fake scheduler talks to ``python -m gapless.executor``."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from gapless.protos import model_folder, rendezvous
from gapless.protos.messages import Attach, ExecutorFault, StepDone, StepNumber, StepReady, Stop
from gapless.protos.sampling import Sampling
from gapless.protos.seats import Int32s, SeatLayout
from gapless.protos.slots import NO_CARRY, Features, Frame, Rows
from tests.executor_process.fake_scheduler import EPOCH, executor_child, fake_scheduler
from tests.executor_process.frames import int32s, no_assignments, one_row
from tests.models import tiny_model_folder

pytestmark = pytest.mark.processes

BLOCK_TOKENS = 4
SEAT_BLOCK_MAX = 16
PROMPTS = ((5, 6, 7), (40, 41, 42, 43, 44, 45), (9,), (100, 3, 200, 17))
NEW_TOKENS = 24
FLAGS = ("--dtype", "float64", "--kv-blocks", "80", "--block-tokens", str(BLOCK_TOKENS))
ATTACH = Attach(
    epoch=EPOCH,
    row_max=4,
    token_max=64,
    assignment_max=256,
    seat_count=6,
    seat_block_max=SEAT_BLOCK_MAX,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("tiny"), dtype="float64")


def seat_words(layout: SeatLayout, seat: int) -> Int32s:
    """Everything a greedy sequence in `seat` needs, as assignments ``[n, 3]``."""
    words, values = layout.sampling_words(Sampling(temperature=0.0))
    blocks = np.arange(SEAT_BLOCK_MAX, dtype=np.int32)
    words = np.concatenate([words, layout.blocks_at + blocks])
    values = np.concatenate([values, 1 + (seat - 1) * SEAT_BLOCK_MAX + blocks])
    return np.stack([np.full_like(words, seat), words, values], axis=1)


def prefill(step: int, assignments: Int32s) -> Frame:
    """All prompts in one step, in seats 1.. ."""
    lengths = int32s(*map(len, PROMPTS))
    return Frame(
        epoch=EPOCH,
        step=StepNumber(step),
        rows=Rows(
            seat=np.arange(1, len(PROMPTS) + 1, dtype=np.int32),
            carry_row=np.full(len(PROMPTS), NO_CARRY, np.int32),
            query_start=(np.cumsum(lengths) - lengths).astype(np.int32),
            query_length=lengths,
            context_length=lengths,
            result_count=np.ones(len(PROMPTS), np.int32),
        ),
        token_ids=np.concatenate([int32s(*prompt) for prompt in PROMPTS]),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        assignments=assignments,
        features=Features.NONE,
        published_ns=0,
    )


def decode(step: int, carry_row: Int32s, context_length: Int32s) -> Frame:
    """One more token of each sequence; row r continues row `carry_row[r]` of the step before."""
    count = len(carry_row)
    seats = _seats_of(step, count)
    return Frame(
        epoch=EPOCH,
        step=StepNumber(step),
        rows=Rows(
            seat=seats,
            carry_row=carry_row,
            query_start=np.arange(count, dtype=np.int32),
            query_length=np.ones(count, np.int32),
            context_length=context_length,
            result_count=np.ones(count, np.int32),
        ),
        token_ids=np.zeros(count, np.int32),
        positions=context_length - 1,
        assignments=no_assignments(),
        features=Features.NONE,
        published_ns=0,
    )


def _seats_of(step: int, count: int) -> Int32s:
    """Seats by row: the rows move by one place each step, so carrying over moves tokens."""
    return np.roll(np.arange(1, count + 1, dtype=np.int32), step)


def expected_tokens(model: Path) -> list[list[int]]:
    """transformers' own greedy answers, up to the end token."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        done = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(done[0, len(prompt) :].tolist())
    return answers


def test_a_whole_generation_two_steps_deep_equals_transformers(model: Path, tmp_path: Path) -> None:
    count = len(PROMPTS)
    lengths = int32s(*map(len, PROMPTS))
    answers: dict[int, list[int]] = {seat: [] for seat in range(1, count + 1)}
    with (
        fake_scheduler(tmp_path, ATTACH) as scheduler,
        executor_child(tmp_path, model, *FLAGS) as child,
    ):
        # Half of the seats come with the table, half with the first frame.
        for seat in (1, 2):
            words = seat_words(scheduler.seats, seat)
            scheduler.seat_table[words[:, 0], words[:, 1]] = words[:, 2]
        late = np.concatenate([seat_words(scheduler.seats, seat) for seat in (3, 4)])
        hello = scheduler.attach()
        assert child.ready_line() == "ready\n"
        facts = hello.facts
        assert facts.revision == model_folder.revision(model)
        assert (facts.dtype, facts.device) == ("float64", "cpu")
        assert (facts.block_count, facts.block_tokens) == (80, BLOCK_TOKENS)
        assert hello.pid == child.popen.pid

        def frame(step: int) -> Frame:
            if step == 0:
                return prefill(0, late)
            seats = _seats_of(step, count)
            carry = int32s(*(list(_seats_of(step - 1, count)).index(seat) for seat in seats))
            return decode(step, carry, lengths[seats - 1] + np.int32(step))

        scheduler.publish(frame(0))
        for step in range(NEW_TOKENS):
            if step + 1 < NEW_TOKENS:
                scheduler.publish(frame(step + 1))
            result = scheduler.result()
            assert result.step == step
            assert not result.faults.any()
            assert result.accepted_ns <= result.started_ns <= result.finished_ns
            for seat, token in zip(_seats_of(step, count), result.tokens, strict=True):
                answers[int(seat)].append(int(token))
            if step == 10:
                # The scheduler drains, so the executor serves on until it hears Stop.
                child.popen.send_signal(signal.SIGTERM)
        assert rendezvous.results_path(tmp_path, EPOCH).exists()
        scheduler.send(Stop())
        status, out, log = child.end()
    assert status == 0, log
    assert "stopped" in log
    assert not rendezvous.results_path(tmp_path, EPOCH).exists()
    loaded = {name.split(".")[0] for name in json.loads(out.splitlines()[-1])}
    assert "torch" in loaded
    assert "grpc" not in loaded
    modules = json.loads(out.splitlines()[-1])
    rooms = {name.split(".")[1] for name in modules if name.startswith("gapless.")}
    assert rooms == {"protos", "executor"}
    for answer, expected in zip(answers.values(), expected_tokens(model), strict=True):
        assert answer[: len(expected)] == expected
        assert len(set(answer)) > 3, "a constant answer would prove little"


def test_stop_lets_the_accepted_steps_finish(model: Path, tmp_path: Path) -> None:
    with (
        fake_scheduler(tmp_path, ATTACH) as scheduler,
        executor_child(tmp_path, model, *FLAGS) as child,
    ):
        scheduler.attach()
        scheduler.publish(one_row(0, (5, 6), epoch=EPOCH))
        scheduler.publish(one_row(1, (0,), position=2, carry_row=0, epoch=EPOCH))
        scheduler.send(Stop())
        assert scheduler.receive() == StepDone(EPOCH, StepNumber(0))
        assert scheduler.receive() == StepDone(EPOCH, StepNumber(1))
        status, _, log = child.end()
    assert status == 0, log


def test_the_end_of_the_scheduler_ends_the_executor(model: Path, tmp_path: Path) -> None:
    with executor_child(tmp_path, model, *FLAGS) as child:
        with fake_scheduler(tmp_path, ATTACH) as scheduler:
            scheduler.attach()
        status, _, log = child.end()
    assert status == 3
    assert log.strip().splitlines()[-1].endswith("ERROR the scheduler is gone")


def test_a_broken_frame_is_told_and_ends_the_executor(model: Path, tmp_path: Path) -> None:
    with (
        fake_scheduler(tmp_path, ATTACH) as scheduler,
        executor_child(tmp_path, model, *FLAGS) as child,
    ):
        scheduler.attach()
        scheduler.send(StepReady(EPOCH, StepNumber(0)))
        fault = scheduler.receive()
        assert isinstance(fault, ExecutorFault)
        assert fault.epoch == EPOCH
        assert fault.message == "AssertionError: no frame in the slot of step 0: 0x0"
        status, _, log = child.end()
    assert status == 1
    assert "Traceback" in log


def test_a_step_that_fails_is_told_and_ends_the_executor(model: Path, tmp_path: Path) -> None:
    with (
        fake_scheduler(tmp_path, ATTACH) as scheduler,
        executor_child(tmp_path, model, *FLAGS) as child,
    ):
        scheduler.attach()
        # A token that the model does not have: nothing at the border can know.
        scheduler.publish(one_row(0, (1_000_000,), epoch=EPOCH))
        fault = scheduler.receive()
        assert isinstance(fault, ExecutorFault)
        assert fault.message.startswith("StepError: IndexError: ")
        assert "\n" not in fault.message
        status, _, log = child.end()
    assert status == 1
    assert "IndexError" in log


def test_a_second_signal_ends_at_once(model: Path, tmp_path: Path) -> None:
    with (
        fake_scheduler(tmp_path, ATTACH) as scheduler,
        executor_child(tmp_path, model, *FLAGS) as child,
    ):
        scheduler.attach()
        child.popen.send_signal(signal.SIGTERM)
        child.wait_log("serving until the scheduler says stop")
        child.popen.send_signal(signal.SIGTERM)
        status, _, log = child.end()
    assert status == 130
    assert "leaving at once" in log


def test_sigterm_before_any_scheduler_ends_well(model: Path, tmp_path: Path) -> None:
    with executor_child(tmp_path, model, *FLAGS) as child:
        child.wait_log("waiting for the scheduler")
        child.popen.send_signal(signal.SIGTERM)
        status, _, log = child.end()
    assert status == 0
    assert "stopped before any step came" in log


def test_sigterm_while_loading_ends_well(model: Path, tmp_path: Path) -> None:
    with executor_child(tmp_path, model, *FLAGS) as child:
        child.wait_log("importing torch")
        os.kill(child.popen.pid, signal.SIGTERM)
        status, _, _ = child.end()
    assert status == 0
