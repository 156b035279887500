"""When a scheduler verifies itself and collects garbage: idle, seldom, and never in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gapless.protos.messages import Epoch
from gapless.scheduler.config import CoreConfig, GatewayIndex
from gapless.scheduler.core import Core
from gapless.scheduler.rest import BUSY_COLLECT_INTERVAL_S, IDLE_INTERVAL_S, Rest
from tests.scheduler_process.players import FACTS
from tests.scheduler_process.test_malformed import VALID

GATEWAY = GatewayIndex(0)


class CountingCore(Core):
    """A core that knows how often it was verified."""

    checks = 0

    def check(self) -> None:
        self.checks += 1
        super().check()


@pytest.fixture
def core() -> Iterator[CountingCore]:
    yield CountingCore(CoreConfig.from_facts(FACTS, running_max=4, queued_max=4), Epoch(1))
    gc.unfreeze()
    gc.enable()


def test_the_collector_never_runs_by_itself(core: CountingCore) -> None:
    Rest(0.0)
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_a_scheduler_that_did_nothing_has_nothing_to_verify(core: CountingCore) -> None:
    rest = Rest(0.0)
    assert rest.next_at(None) is None
    assert rest.next_at(core) is None
    rest.take(100.0, None)
    rest.take(100.0, core)
    assert core.checks == 0


def test_an_idle_scheduler_verifies_once_after_its_work(core: CountingCore) -> None:
    rest = Rest(0.0)
    core.submit(1.0, GATEWAY, VALID)
    rest.take(IDLE_INTERVAL_S + 1, core)
    assert core.checks == 0, "a request is live"
    assert rest.next_at(core) is None
    core.gateway_gone(20.0, GATEWAY)
    due = rest.next_at(core)
    assert due == IDLE_INTERVAL_S
    rest.take(due - 1, core)
    assert core.checks == 0
    rest.take(due, core)
    rest.take(due + 100, core)
    assert core.checks == 1
    assert rest.next_at(core) is None, "nothing happened since"


def test_a_busy_scheduler_collects_seldom_and_verifies_never(core: CountingCore) -> None:
    rest = Rest(0.0)
    core.submit(1.0, GATEWAY, VALID)
    before = gc.get_stats()[1]["collections"]
    for second in range(1, int(BUSY_COLLECT_INTERVAL_S) * 2):
        rest.take(float(second), core)
    assert gc.get_stats()[1]["collections"] == before + 1
    assert core.checks == 0
