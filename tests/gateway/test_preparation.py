"""How many requests may be in preparation, whoever waits for them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gapless.gateway.failures import Failure
from gapless.gateway.preparation import Preparation
from gapless.protos.reasons import Reason
from tests.gateway.harness import served_model

LIMIT_S = 60


def test_work_that_nobody_waits_for_holds_its_place_and_is_not_begun() -> None:
    """Otherwise callers who come and go would pile up their requests behind a busy thread."""
    go, begun = threading.Event(), threading.Event()
    ran: list[str] = []

    def latched() -> str:
        begun.set()
        assert go.wait(LIMIT_S)
        return "latched"

    async def scenario() -> None:
        preparation = Preparation(served_model(), threads=1, preparing_max=2)
        first = asyncio.create_task(preparation.run(latched))
        await asyncio.to_thread(begun.wait, LIMIT_S)
        second = asyncio.create_task(preparation.run(lambda: ran.append("second")))
        await asyncio.sleep(0)  # it has begun to wait
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        with pytest.raises(Failure) as refused:
            await preparation.run(lambda: ran.append("third"))
        assert refused.value.reason is Reason.QUEUE_FULL
        go.set()
        assert await first == "latched"
        # The one thread comes to the second, and passes it over, before it comes to this.
        await preparation.run(lambda: ran.append("fourth"))
        assert ran == ["fourth"]
        preparation.close()

    asyncio.run(scenario())
