"""One server with a tiny random model for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import tiny_model_folder
from tests.processes.plans import TINY_CONTEXT_LENGTH, tiny_plan
from tests.processes.reference import Reference
from tests.processes.report import pytest_runtest_makereport
from tests.processes.server import Server, serve

__all__ = ["pytest_runtest_makereport"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("tiny"), context_length=TINY_CONTEXT_LENGTH)


@pytest.fixture(scope="session")
def tiny_reference(tiny_folder: Path) -> Reference:
    return Reference(tiny_folder)


@pytest.fixture(scope="session")
def tiny_server(tiny_folder: Path) -> Iterator[Server]:
    with serve(tiny_plan(tiny_folder, gateway_count=2)) as server:
        yield server
