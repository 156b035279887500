"""Lint and format hold; `make check` adds types, which depend on the releases of others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=["lint", "format"])
def test_ruff_has_nothing_to_say(arguments: tuple[str, ...]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "--no-cache", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
