"""Each recorded case on a server with the demo model."""

from __future__ import annotations

import asyncio

import pytest

from tests.cases.case_file import Case, load
from tests.cases.runner import run_case
from tests.processes.calls import connect
from tests.processes.server import Server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.model,
    pytest.mark.timeout(400),  # the first one may fetch and convert the model
]

FILE = load()


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in FILE.cases])
def test_case(demo_server: Server, case: Case) -> None:
    async def scenario() -> None:
        async with connect(demo_server.address, demo_server.admin_address) as gateway:
            await run_case(gateway, case, FILE)

    asyncio.run(scenario())
