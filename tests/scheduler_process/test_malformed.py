"""What is no word is dropped, and what no gateway may ask is refused; neighbours go on."""

from __future__ import annotations

import random

import msgspec
import pytest

from gapless.protos.messages import (
    Cancel,
    CancelCause,
    Failed,
    Handle,
    StepDone,
    Stopping,
    Submit,
)
from gapless.protos.reasons import Reason
from gapless.protos.sampling import BIAS_ENTRIES_MAX, Sampling
from tests.scheduler_process.players import VOCAB_SIZE, stream_of
from tests.scheduler_process.rig import Rig

pytestmark = pytest.mark.processes

VALID = Submit(
    handle=Handle(7),
    request_id="seven",
    tenant="",
    prompt=bytes(8),
    sampling=Sampling(),
    stopping=Stopping(4),
    received_s=0.0,
)


def test_random_bytes_and_truncated_words_are_dropped(rig: Rig) -> None:
    gateway, executor = rig.serve()
    executor.latched = True
    running = gateway.submit(1)
    rig.until(lambda: gateway.is_admitted(running))
    source = random.Random(2024)
    assert executor.attach is not None
    good = [
        msgspec.msgpack.encode(VALID),
        msgspec.msgpack.encode(Cancel((Handle(1),), CancelCause.CLIENT)),
        msgspec.msgpack.encode(StepDone(executor.attach.epoch, executor.accepted[0].step)),
    ]
    for _ in range(300):
        word = source.choice(good)
        truncated = word[: source.randrange(len(word))]
        noise = source.randbytes(source.randrange(60))
        for player in (gateway, executor):
            player.socket.send(source.choice((truncated, noise)))
    gateway.socket.send_multipart([b"", b"two", b"parts"])
    gateway.socket.send(b"")
    assert rig.stats(gateway).running_requests == 1
    executor.latched = False
    rig.until(lambda: gateway.end(running) is not None)
    assert gateway.tokens[running] == stream_of(1, 5, 10)
    assert "dropped" in rig.scheduler.log()


def changed(**fields: object) -> Submit:
    return msgspec.structs.replace(VALID, **fields)


MISTAKES = [
    changed(candidate_count=2),
    changed(prior=(bytes(4),)),
    changed(prompt=b""),
    changed(prompt=bytes(7)),
    changed(prompt=b"\xff" * 4),
    changed(prompt=VOCAB_SIZE.to_bytes(4, "little")),
    changed(stopping=Stopping(0)),
    changed(stopping=Stopping(2**40)),
    changed(stopping=Stopping(4, min_new_tokens=-1)),
    changed(stopping=Stopping(4, stop_strings=(b"a", b""))),
    changed(stopping=Stopping(4, stop_tokens=(VOCAB_SIZE,))),
    changed(sampling=Sampling(seed=-1)),
    changed(sampling=Sampling(top_k=2**31)),
    changed(sampling=Sampling(bias_tokens=(1,))),
    changed(sampling=Sampling(bias_tokens=(-1,), bias_values=(0.5,))),
    changed(
        sampling=Sampling(
            bias_tokens=(1,) * (BIAS_ENTRIES_MAX + 1),
            bias_values=(0.5,) * (BIAS_ENTRIES_MAX + 1),
        )
    ),
    changed(sampling=Sampling(allowed_tokens=(VOCAB_SIZE,))),
    changed(priority=2**40),
    changed(deadline_s=float("nan")),
    changed(queue_timeout_s=float("inf")),
]


def test_a_submit_that_no_gateway_may_send_is_refused(rig: Rig) -> None:
    gateway, _ = rig.serve()
    for k, mistake in enumerate(MISTAKES):
        gateway.say(msgspec.structs.replace(mistake, handle=Handle(k)))
    rig.until(lambda: len(gateway.events) == len(MISTAKES))
    for k, mistake in enumerate(MISTAKES):
        failed = gateway.end(Handle(k))
        assert isinstance(failed, Failed), mistake
        assert failed.reason is Reason.ENGINE_ERROR, (mistake, failed)
    gateway.say(msgspec.structs.replace(VALID, handle=Handle(-1)))
    gateway.say(msgspec.structs.replace(VALID, handle=Handle(2**63)))
    handle = gateway.submit(99)
    rig.until(lambda: gateway.end(handle) is not None)
    assert gateway.tokens[handle] == stream_of(99, 5, 10)


def test_a_handle_that_is_live_is_not_submitted_twice(rig: Rig) -> None:
    gateway, executor = rig.serve()
    executor.latched = True
    handle = gateway.submit(1)
    rig.until(lambda: gateway.is_admitted(handle))
    gateway.submit(1, request_id="another")
    rig.stats(gateway)
    assert "a second Submit of handle 1" in rig.scheduler.log()
    executor.latched = False
    rig.until(lambda: gateway.end(handle) is not None)
    assert gateway.tokens[handle] == stream_of(1, 5, 10)


def test_handles_of_another_gateway_are_none_of_ones_business(rig: Rig) -> None:
    gateway, executor = rig.serve()
    other = rig.gateway()
    rig.until(lambda: bool(other.welcomes))
    executor.latched = True
    handle = gateway.submit(1)
    rig.until(lambda: gateway.is_admitted(handle))
    other.say(Cancel((handle, Handle(2**63), Handle(-5)), CancelCause.API))
    rig.stats(other)
    executor.latched = False
    rig.until(lambda: gateway.end(handle) is not None)
    assert gateway.tokens[handle] == stream_of(1, 5, 10)
