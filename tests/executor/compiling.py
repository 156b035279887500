"""Runs a module that compiles kernels for Hopper, where no GPU is."""

from __future__ import annotations

import os
import subprocess
import sys


def compiled_count(module: str) -> int:
    """How many kernels ``python -m module`` compiled; each printed a line that begins so.

    In a process of its own, as Triton decides at import whether it compiles or interprets.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.count("compiled")
