"""The journal: what is live, and one line at each end."""

from __future__ import annotations

import json
import logging

import msgspec
import pytest

from gapless.protos.messages import Admitted, Failed, Finished, FinishReason, Handle, Timing
from gapless.protos.reasons import Reason
from gapless.scheduler.config import GatewayIndex
from gapless.scheduler.journal import Journal
from tests.scheduler_process.test_malformed import VALID

FIRST, SECOND = GatewayIndex(0), GatewayIndex(1)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def written(lines: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [json.loads(line.removeprefix("end ")) for line in lines.messages]


def finished(handle: int) -> Finished:
    return Finished(Handle(handle), FinishReason.STOP_TOKEN, 12, 3, 1, Timing(0.5, 0.25, 2.0))


def test_live_requests_are_known_by_gateway(lines: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    journal.begin(1.0, FIRST, VALID)
    journal.begin(1.0, SECOND, VALID)
    journal.begin(1.0, SECOND, msgspec.structs.replace(VALID, handle=Handle(8)))
    assert journal.live_count == 3
    assert journal.is_live(FIRST, Handle(7))
    assert not journal.is_live(FIRST, Handle(8))
    assert journal.live() == [(FIRST, (Handle(7),)), (SECOND, (Handle(7), Handle(8)))]
    journal.end(2.0, FIRST, (Admitted(Handle(7)),))
    assert written(lines) == []
    journal.end(2.0, FIRST, (finished(7),))
    assert journal.live() == [(SECOND, (Handle(7), Handle(8)))]
    journal.forget(SECOND)
    assert journal.live_count == 0
    assert [line["reason"] for line in written(lines)] == ["STOP_TOKEN", *["GATEWAY_GONE"] * 2]


def test_a_line_has_what_one_asks_for_later(lines: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    tenant = msgspec.structs.replace(VALID, tenant="acme", request_id='a "quoted"\nid')
    journal.begin(1.0, FIRST, tenant)
    journal.end(4.0, FIRST, (finished(7),))
    assert "\n" not in lines.messages[0]
    assert written(lines) == [
        {
            "id": 'a "quoted"\nid',
            "tenant": "acme",
            "prompt_tokens": 2,
            "reason": "STOP_TOKEN",
            "total_s": 3.0,
            "completion_tokens": 12,
            "cached_prompt_tokens": 3,
            "preemptions": 1,
            "queue_s": 0.5,
            "prefill_s": 0.25,
            "decode_s": 2.0,
        }
    ]


def test_a_refusal_is_an_end_too(lines: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    journal.begin(1.0, FIRST, VALID)
    journal.end(1.0, FIRST, (Failed(Handle(7), Reason.QUEUE_FULL, "full"),))
    assert journal.live_count == 0
    assert written(lines)[0]["reason"] == "QUEUE_FULL"


def test_an_end_of_what_is_not_live_is_our_mistake() -> None:
    journal = Journal()
    with pytest.raises(AssertionError, match="is not live"):
        journal.end(1.0, FIRST, (finished(7),))
    journal.begin(1.0, FIRST, VALID)
    with pytest.raises(AssertionError, match="is live already"):
        journal.begin(1.0, FIRST, VALID)
