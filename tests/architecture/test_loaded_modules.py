"""What the entry modules really load, read from `sys.modules` of a fresh interpreter.

The static contracts cannot see imports made by other packages; this can.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Final

import pytest

FORBIDDEN: Final = {
    "gapless.scheduler.__main__": (
        "torch",
        "grpc",
        "transformers",
        "gapless.gateway",
        "gapless.executor",
        "gapless.client",
    ),
    "gapless.executor.__main__": ("grpc", "gapless.scheduler", "gapless.gateway", "gapless.client"),
    "gapless.gateway.__main__": (
        "torch",
        "gapless.scheduler",
        "gapless.executor",
        "gapless.client",
    ),
    "gapless.bench.__main__": (
        "torch",
        "grpc",
        "transformers",
        "gapless.gateway",
        "gapless.scheduler",
        "gapless.executor",
        "gapless.client",
    ),
    "gapless.client.__main__": (
        "torch",
        "transformers",
        "zmq",
        "numpy",
        "gapless.scheduler",
        "gapless.executor",
        "gapless.gateway",
    ),
}

PROGRAM = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("entry", FORBIDDEN)
def test_an_entry_module_loads_nothing_forbidden(entry: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, entry],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    loaded = json.loads(found.stdout.splitlines()[-1])
    assert entry in loaded
    broken = [
        name
        for name in loaded
        if any(name == other or name.startswith(f"{other}.") for other in FORBIDDEN[entry])
    ]
    assert broken == []
