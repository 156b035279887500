"""What a scheduler that has served a request has imported, told by the interpreter itself."""

from __future__ import annotations

import re
import signal
from typing import Final

import pytest

from tests.scheduler_process.rig import Rig

pytestmark = pytest.mark.processes

FORBIDDEN: Final = (
    "torch",
    "grpc",
    "google",
    "transformers",
    "gapless.gateway",
    "gapless.executor",
    "gapless.client",
)


def test_a_scheduler_that_has_served_imported_nothing_forbidden(rig: Rig) -> None:
    rig.start(interpreter=("-X", "importtime"))
    gateway, _ = rig.gateway(), rig.executor()
    rig.until(lambda: bool(gateway.welcomes))
    handle = gateway.submit(1, stop_strings=(b"\n",))
    rig.until(lambda: gateway.end(handle) is not None)
    gateway.finished(handle)
    rig.scheduler.send(signal.SIGTERM)
    assert rig.until_ended() == 0
    imported = re.findall(r"^import time:[^|]*\|[^|]*\|\s*(\S+)$", rig.scheduler.log(), re.M)
    assert "gapless.scheduler.loop" in imported
    broken = [
        name
        for name in imported
        if any(name == other or name.startswith(f"{other}.") for other in FORBIDDEN)
    ]
    assert broken == []
