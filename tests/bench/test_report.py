"""Numbers of a known log, comparing tokens, and the table."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from gapless.bench import report, work
from gapless.bench.measure import DepthRuns, Run
from gapless.bench.options import Options, parse
from gapless.bench.sizes import find_model
from gapless.protos.messages import ModelFacts
from tests.bench.test_trace import run_of


def options(*words: str) -> Options:
    return parse(["--model", "preset:llama-8b", *words])


def row(run: Run, device: str, *words: str) -> dict[str, Any]:
    model, todo = find_model("preset:llama-8b"), work.batch(2, 3, 4, 100)
    facts = ModelFacts("r", 100, 64, 16, 9, 2, 8, device, "bfloat16")
    log = "x\nattention: flashinfer\nready after 3.50 s: imports 2.00, KV pool 0.50, graphs 1.00\n"
    runs = DepthRuns(run.depth, facts, 1.0, {"scheduler": 1 << 20}, 2 << 30, log, (run,))
    origin = report.Origin("gapless", "gapless bench", "id", {}, "some GPU")
    return report.row_of(origin, options(*words), model, todo, runs, run)


def test_a_known_log_gives_known_numbers() -> None:
    """Steps of 1,000 ns behind gaps of 80 ns; see `run_of`."""
    found = row(run_of(1, 2001), "cuda:0")
    assert found["step_count"] == 2000
    assert found["gpu_active"] == round(1000 / 1080, 6)
    assert found["bubble_ms"] == {
        "no_request": 0.0,
        "scheduler": 0.1,
        "border_and_upload": 0.04,
        "launch": 0.02,
    }
    assert found["bubble_share"]["scheduler"] == round(50 / 1080, 6)
    assert found["bubble_share"]["launch"] == round(10 / 1080, 6)
    assert found["gap_us_p50"] == found["gap_us_max"] == 0.08
    assert found["attention"] == "flashinfer"
    assert found["start_phases_s"] == {"imports": 2.0, "KV pool": 0.5, "graphs": 1.0}
    assert found["device_memory_bytes"] == 2 << 30
    assert report.table([found, found]).count("\n") > 30


def test_the_floor_is_weights_and_keys_and_values_over_bandwidth() -> None:
    found = row(run_of(1, 11), "cuda:0", "--read-bandwidth-tb-s", "4.0")
    # 200 positions of 128 KiB beside 15 GB of weights.
    expected_ms = (2 * 7_504_924_672 + 200 * 131_072) / 4.0e12 * 1e3
    assert found["floor_ms_per_step"] == pytest.approx(expected_ms, abs=1e-3)
    assert found["floor_share"] == pytest.approx(expected_ms / 1080e-6, rel=1e-3)
    assert row(run_of(1, 11), "cpu")["floor_ms_per_step"] is None


def test_a_difference_is_placed() -> None:
    tokens = [np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)]
    other = [np.array([1, 2, 3], np.int32), np.array([4, 6], np.int32)]
    first = dataclasses.replace(run_of(1, 2), tokens=tokens)
    assert report.difference(first, first) == (2, None)
    assert report.difference(first, dataclasses.replace(first, tokens=other)) == (1, 1)
    assert report.first_difference(tokens[1], other[1]) == 1
