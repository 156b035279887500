"""The page of results: with none, with ours, with those of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from benchmarks.plot import read_groups, write_page
from tests.bench.test_trace import run_of

OTHERS: dict[str, Any] = {
    "system": "transformers",
    "mode": "async",
    "work": {"model": "llama-8b", "batch": 2, "prompt": 3, "new": 4},
    "seconds": 106.7,
    "gpu": "some GPU",
    "versions": {"torch": "2.11"},
    "run_id": "r1",
}


def ours(depth: int, steps_file: str | None) -> dict[str, Any]:
    return {
        **OTHERS,
        "system": "gapless",
        "mode": f"depth{depth}",
        "work": {**OTHERS["work"], "model": "preset:llama-8b"},
        "seconds": 80.0,
        "gpu_active": 0.9995,
        "steps_file": steps_file,
    }


def test_without_results_the_page_says_so(tmp_path: Path) -> None:
    write_page(tmp_path / "results", tmp_path / "README.md")
    assert "no results yet" in (tmp_path / "README.md").read_text()


def test_rows_of_one_run_share_a_table(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "a.json").write_text(json.dumps([ours(1, None), ours(2, None)]))
    (results / "b.json").write_text(json.dumps(OTHERS))
    (results / "c.json").write_text(json.dumps({**OTHERS, "run_id": "r2"}))
    assert [len(group) for group in read_groups(results)] == [3, 1]
    page = tmp_path / "README.md"
    write_page(results, page)
    text = page.read_text()
    assert "| gapless | depth2 | - | 80.0 | - | - | - | 99.95% |" in text
    assert "| transformers | async | - | 106.7 |" in text
    assert not (tmp_path / "plots").exists()


def test_step_logs_become_pictures(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    for depth in (1, 2):
        np.save(results / f"{depth}.npy", run_of(depth, 400).steps)
    (results / "a.json").write_text(json.dumps([ours(1, "1.npy"), ours(2, "2.npy")]))
    page = tmp_path / "README.md"
    write_page(results, page)
    pictures = sorted((tmp_path / "plots").iterdir())
    assert [path.stem.rpartition("-")[2] for path in pictures] == ["border", "context", "timeline"]
    for path in pictures:
        assert f"(plots/{path.name})" in page.read_text()
        ElementTree.fromstring(path.read_text())
    shown = pictures[2].read_text()
    assert shown.count(">scheduler<") >= 2
    assert "border and upload" in shown
