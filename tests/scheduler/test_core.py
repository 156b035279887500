"""The core's rules, one at a time; whole runs are in the transcripts and the simulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gapless.protos.messages import Admitted, Epoch, Failed, Finished, FinishReason, PrefillStarted
from gapless.protos.reasons import Reason
from gapless.protos.sampling import ALLOWED_TOKENS_MAX, BIAS_ENTRIES_MAX
from gapless.protos.seats import TEMPERATURE
from gapless.protos.slots import Features, Frame
from gapless.scheduler.config import GatewayIndex
from gapless.scheduler.core import Core
from gapless.scheduler.frames import apply_assignments
from gapless.scheduler.statistics import Window
from tests.scheduler.words import GATEWAY, config, events_of, result_of, submit, tokens_of


def built(core: Core) -> Frame:
    frame = core.build(0.0)
    assert frame is not None
    core.check()
    frame.check()
    return frame


def run_to_the_end(core: Core, token: int = 7) -> list[Frame]:
    """Answers every frame at once until nobody is left; the frames."""
    frames = []
    while not core.is_idle:
        frame = built(core)
        frames.append(frame)
        core.result(0.0, result_of(frame, token))
        core.check()
    return frames


def test_updates_are_split_by_gateway() -> None:
    core = Core(config(), Epoch(1))
    for handle, gateway in ((1, 5), (2, 6), (3, 5)):
        core.submit(0.0, GatewayIndex(gateway), submit(handle))
    core.take_updates()
    core.result(0.0, result_of(built(core)))
    updates = core.take_updates()
    assert sorted(updates) == [5, 6]
    assert tokens_of({GATEWAY: updates[GatewayIndex(5)]}) == [(1, 7), (3, 7)]
    assert tokens_of({GATEWAY: updates[GatewayIndex(6)]}) == [(2, 7)]
    assert core.take_updates() == {}


def test_two_results_in_one_update_keep_their_order() -> None:
    core = Core(config(), Epoch(1))
    core.submit(0.0, GATEWAY, submit(1))
    first, second = built(core), built(core)
    core.result(0.0, result_of(first, 11))
    core.result(0.0, result_of(second, 12))
    updates = core.take_updates()
    assert tokens_of(updates) == [(1, 11), (1, 12)]
    assert [type(event) for event in events_of(updates)] == [Admitted, PrefillStarted]


def test_features_are_those_of_the_rows() -> None:
    cases = {
        Features.NONE: submit(1),
        Features.RANDOM: submit(1, temperature=1.0),
        Features.RANDOM | Features.TRUNCATED: submit(1, temperature=0.5, min_p=0.1),
        Features.BIAS: submit(1, bias_tokens=(3,), bias_values=(1.0,)),
        Features.ALLOWED: submit(1, allowed_tokens=(3,)),
    }
    for features, word in cases.items():
        core = Core(config(), Epoch(1))
        core.submit(0.0, GATEWAY, word)
        assert built(core).features == features


def test_truncation_without_chance_is_no_feature() -> None:
    core = Core(config(), Epoch(1))
    core.submit(0.0, GATEWAY, submit(1, top_k=4, top_p=0.5))
    assert built(core).features == Features.NONE


def test_the_shared_table_says_what_the_seats_say() -> None:
    core = Core(config(), Epoch(1))
    layout = core.config.seat_layout
    shared = layout.table(bytearray(layout.size_bytes))
    for handle in (1, 2):
        core.submit(0.0, GATEWAY, submit(handle, new := 9, max_new_tokens=new, temperature=0.25))
    for _ in range(4):
        frame = built(core)
        apply_assignments(shared, frame.assignments)
        core.result(0.0, result_of(frame))
    written = layout.table(bytearray(layout.size_bytes))
    core.write_table(written)
    assert (written == shared).all()
    assert shared[1, TEMPERATURE : TEMPERATURE + 1].view(np.float32)[0] == 0.25


def test_a_shorter_holder_zeroes_what_is_left_of_its_seats_block_list() -> None:
    core = Core(config(running_max=1), Epoch(1))
    layout = core.config.seat_layout
    shared = layout.table(bytearray(layout.size_bytes))
    for handle, prompt_tokens in ((1, 13), (2, 2)):
        core.submit(0.0, GATEWAY, submit(handle, prompt_tokens, max_new_tokens=1))
    for frame in run_to_the_end(core):
        apply_assignments(shared, frame.assignments)
    blocks = shared[1, layout.blocks_at : layout.bias_tokens_at]
    assert np.count_nonzero(blocks) == 1, blocks


def test_more_stop_tokens_than_anybody_had_before() -> None:
    core = Core(config(), Epoch(1))
    core.submit(0.0, GATEWAY, submit(1, stop_tokens=(90,)))
    core.submit(0.0, GATEWAY, submit(2, stop_tokens=tuple(range(20, 40))))
    core.submit(0.0, GATEWAY, submit(3, stop_tokens=()))
    run_to_the_end(core, token=39)
    reasons = {
        event.handle: event.reason
        for event in events_of(core.take_updates())
        if isinstance(event, Finished)
    }
    limit = FinishReason.MAX_NEW_TOKENS
    assert reasons == {1: limit, 2: FinishReason.STOP_TOKEN, 3: limit}


def test_admissions_stay_within_the_assignments_of_a_frame() -> None:
    everything: dict[str, Any] = {
        "bias_tokens": tuple(range(BIAS_ENTRIES_MAX)),
        "bias_values": (0.5,) * BIAS_ENTRIES_MAX,
        "allowed_tokens": tuple(range(ALLOWED_TOKENS_MAX)),
    }
    core = Core(config(), Epoch(1))
    for handle in (1, 2, 3):
        core.submit(0.0, GATEWAY, submit(handle, **everything))
    frames = [built(core), built(core)]
    assert [frame.row_count for frame in frames] == [1, 2]
    assert all(len(frame.assignments) <= core.config.assignment_max for frame in frames)


def test_a_token_outside_the_vocabulary_is_a_fault_of_its_row() -> None:
    for token in (100, -1):
        core = Core(config(), Epoch(1))
        core.submit(0.0, GATEWAY, submit(1))
        core.result(0.0, result_of(built(core), token))
        failed = events_of(core.take_updates())[-1]
        assert isinstance(failed, Failed)
        assert failed.reason is Reason.ENGINE_ERROR
        assert core.is_idle


def test_a_result_that_nobody_asked_for_is_our_mistake() -> None:
    core = Core(config(), Epoch(1))
    core.submit(0.0, GATEWAY, submit(1))
    frame = built(core)
    core.result(0.0, result_of(frame))
    with pytest.raises(AssertionError, match="none is in flight"):
        core.result(0.0, result_of(frame))


def test_one_token_prompts_decode_from_the_first_step() -> None:
    core = Core(config(), Epoch(1))
    core.submit(0.0, GATEWAY, submit(1, prompt_tokens=1, max_new_tokens=1))
    frames = run_to_the_end(core)
    assert len(frames) == 1
    assert frames[0].token_ids.tolist() == [1]


def test_a_sequence_may_fill_the_pool_to_the_last_token() -> None:
    core = Core(config(), Epoch(1))
    tokens_max = core.config.sequence_tokens_max
    core.submit(0.0, GATEWAY, submit(1, tokens_max - 3, max_new_tokens=3))
    core.submit(0.0, GATEWAY, submit(2, 3, max_new_tokens=tokens_max - 3))
    run_to_the_end(core)
    counts = [
        e.completion_tokens for e in events_of(core.take_updates()) if isinstance(e, Finished)
    ]
    assert counts == [3, tokens_max - 3]


def test_times_of_a_request() -> None:
    core = Core(config(), Epoch(1))
    core.submit(1.0, GATEWAY, submit(1, max_new_tokens=2))
    first = core.build(3.0)
    second = core.build(3.5)
    assert first is not None
    assert second is not None
    core.result(7.0, result_of(first))
    core.result(15.0, result_of(second))
    finished = events_of(core.take_updates())[-1]
    assert isinstance(finished, Finished)
    assert (finished.timing.queue_s, finished.timing.prefill_s, finished.timing.decode_s) == (
        2,
        4,
        8,
    )


def test_stats_count_what_happened() -> None:
    core = Core(config(queued_max=3), Epoch(1))
    for handle in range(5):
        core.submit(0.0, GATEWAY, submit(handle))
    core.cancel_by_id(1.0, "", ("r0",))
    stats = core.stats(2.0)
    assert stats.requests_total == 5
    assert stats.requests_rejected_total == 2
    assert stats.requests_cancelled_total == 1
    assert stats.queued_requests == 2
    assert stats.queued_tokens == stats.prompt_tokens_total - 5 == 10
    assert stats.oldest_queued_s == 2.0
    run_to_the_end(core)
    assert core.stats(2.0).generated_tokens_total == 8
    assert core.stats(2.0).mean_step_s == pytest.approx(0.001)


def test_rates_forget_after_ten_seconds() -> None:
    window = Window()
    window.add_step(100.5, 2_000_000, 30)
    window.add_step(101.5, 4_000_000, 70)
    assert window.tokens_per_second(102.0) == 10.0
    assert window.mean_step_s(102.0) == pytest.approx(0.003)
    assert window.tokens_per_second(110.5) == 7.0
    assert window.tokens_per_second(200.0) == 0.0
    assert window.mean_step_s(200.0) == 0.0
