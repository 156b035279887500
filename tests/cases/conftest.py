"""One server with the demo model in float32 for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import demo_model_folder
from tests.processes.plans import demo_plan
from tests.processes.report import pytest_runtest_makereport
from tests.processes.server import Server, serve

__all__ = ["pytest_runtest_makereport"]


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return demo_model_folder()


@pytest.fixture(scope="session")
def demo_server(demo_folder: Path) -> Iterator[Server]:
    with serve(demo_plan(demo_folder)) as server:
        yield server
