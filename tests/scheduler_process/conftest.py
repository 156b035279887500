"""One rig a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scheduler_process.rig import Rig, new_rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    with new_rig() as made:
        yield made
