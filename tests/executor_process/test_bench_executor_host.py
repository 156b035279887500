"""The benchmark of the executor's host drives the real device through a few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.bench_executor_host import COLUMNS, ROW_COUNTS

ROOT = Path(__file__).parents[2]


def test_each_part_of_a_step_is_timed(tmp_path: Path) -> None:
    file = tmp_path / "lines.json"
    command = (sys.executable, "-m", "benchmarks.bench_executor_host")
    # Its stand-ins stay for the rest of the process, so it gets one of its own.
    subprocess.run((*command, "--steps", "5", "--json", str(file)), cwd=ROOT, check=True)
    lines = json.loads(file.read_text())
    assert [line["rows"] for line in lines] == list(ROW_COUNTS)
    for line in lines:
        assert line["us"].keys() == set(COLUMNS)
        assert line["us"]["accept"] > 0
