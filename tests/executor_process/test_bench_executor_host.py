"""The benchmark of the executor's host drives the real device through a few steps."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.bench_executor_host import COLUMNS, ROW_COUNTS, main


def test_each_part_of_a_step_is_timed(tmp_path: Path) -> None:
    file = tmp_path / "lines.json"
    assert main(["--steps", "5", "--json", str(file)]) == 0
    lines = json.loads(file.read_text())
    assert [line["rows"] for line in lines] == list(ROW_COUNTS)
    for line in lines:
        assert line["us"].keys() == set(COLUMNS)
        assert line["us"]["accept"] > 0
