"""Rows of the first steps of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.first_steps import main
from gapless.protos.step_log import STEP_RECORD


def test_the_first_steps_become_a_row_of_their_own(tmp_path: Path) -> None:
    steps = np.zeros(9, STEP_RECORD)
    steps["row_count"][1:] = 4
    steps["built_from_ns"] = 1_000_000 * np.arange(9)
    steps["started_ns"] = 10_000_000 * np.arange(9) + 2_000_000
    steps["finished_ns"] = steps["started_ns"] + 9_000_000
    np.save(tmp_path / "s.npy", steps)
    work = {"model": "m", "batch": 4, "prompt": 2, "new": 8}
    row = {
        **{name: name for name in ("system", "mode", "gpu", "versions", "run_id", "dtype")},
        "attention": "flashinfer",
        "command": "gapless bench",
        "work": work,
        "seconds": 1.0,
        "steps_file": "s.npy",
    }
    path = tmp_path / "r.json"
    path.write_text(json.dumps([row]))
    for _ in range(2):
        assert main([str(path), "3"]) == 0
        kept, added = json.loads(path.read_text())
        assert kept == row
        assert added["work"] == {**work, "new": 3}
        assert added["seconds"] == pytest.approx(0.040)
        assert added["tokens_per_s"] == pytest.approx(300.0)
        assert added["ms_per_step_p50"] == 10.0
        assert added["command"] == "the first 3 steps of: gapless bench"
