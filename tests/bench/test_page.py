"""The page of results: with none, with ours, with those of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import plot, summary
from benchmarks.check_sections import capacity_section, loads_section, stamps_section
from benchmarks.plot import read_groups, write_front, write_page
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


def test_the_front_page_compares_what_ran_together(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    fast = {**ours(2, None), "tokens_per_s": 4000.0, "ms_per_step_p50": 8.5}
    slow = {**OTHERS, "tokens_per_s": 2500.0, "versions": {"transformers": "5.17"}}
    slow |= {"note": "a part of a longer run"}
    alone = {**fast, "run_id": "r9", "work": {**fast["work"], "batch": 7}}
    (results / "a.json").write_text(json.dumps([fast, slow, alone]))
    front = tmp_path / "README.md"
    front.write_text(f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n")
    write_front(results, tmp_path / "benchmarks" / "README.md", front)
    text = front.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{summary.END}\nafter\n")
    assert "All of it was measured in one run" in text
    other = {"run_id": "r3", "work": {**fast["work"], "batch": 9}}
    rows = [{**fast, **other}, {**fast, **other, "system": "vllm", "mode": "async"}]
    (results / "later.json").write_text(json.dumps(rows))
    write_front(results, tmp_path / "benchmarks" / "README.md", front)
    assert "What stands in one row was measured in one run" in front.read_text()
    assert "old" not in text
    assert "| work | Gapless | transformers 5.17 |" in text
    assert "| 2 requests, 3 + 4 tokens | 4,000 (8.50 ms) | 2,500 |" in text
    assert "7 requests" not in text
    assert "\ntransformers at 2 requests, 3 + 4 tokens: a part of a longer run.\n" in text
    assert "(benchmarks/plots/systems.svg)" in text
    ElementTree.fromstring((tmp_path / "benchmarks" / "plots" / "systems.svg").read_text())
    front.write_text("no marks")
    write_front(results, tmp_path / "benchmarks" / "README.md", front)
    assert front.read_text() == "no marks"


def test_the_stamps_are_compared_with_the_profiler() -> None:
    kind = {
        "steps": 200,
        "kernels_per_step": 298.0,
        "stamped_us": 4943.6,
        "busy_us": 4941.6,
        "busy_share_of_stamped": 0.9996,
    }
    found = {"preset": "p", "batch": 32, "gpu": "g", "decode": {"decode_only": kind}, "mixed": {}}
    assert "| decode, decode only | 200 | 298 | 4,944 | 4,942 | 99.96% |" in stamps_section(found)


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


def test_loads_of_a_server_are_told_by_arrivals() -> None:
    spread = {"p50": 1.0, "p95": 2.0, "p99": 3.0}
    row: dict[str, Any] = {
        "work": {"model": "tiny", "rate": None, "concurrency": 8, "flush_interval_ms": 20},
        "gpu": "some GPU",
        "run_id": "r2",
        "tokens_per_s": 1234.5,
        "ttft_ms": spread,
        "inter_token_ms": spread,
        "added": {"ttft_ms_in_server": spread, "inter_token_ms": spread},
        "cpu_us_per_token": {"gapless.gateway": 61.2},
    }
    poisson = {**row, "work": {**row["work"], "rate": 2.0, "concurrency": None}}
    text = loads_section([row, poisson])
    cells = "| 1.0 / 2.0 / 3.0 | 1.0 / 2.0 / 3.0 | 1.0 / 2.0 / 3.0 | 3.00 | 61 |"
    assert f"| 8 at once | 20 | 1,234 {cells}" in text
    assert f"| 2.0 a second, Poisson | 20 | 1,234 {cells}" in text


def test_what_a_gateway_carries_is_told_by_flush_interval() -> None:
    spread = {"p50": 1.0, "p95": 2.0, "p99": 3.0}
    row = {
        "streams": 256,
        "step_ms": 10.0,
        "flush_interval_ms": 20,
        "steps": 1000,
        "processor": "some processor",
        "cores": 2,
        "tokens_per_s": 25600.4,
        "tokens_per_delta": 2.71,
        "gateway_cores": 0.851,
        "gateway_us_per_token": 33.2,
        "newest_token_ms": spread,
        "newest_token_ms_last_tenth": spread,
        "oldest_token_ms": spread,
    }
    cells = " | ".join(["1.0 / 2.0 / 3.0"] * 3)
    assert f"| 20 | 25,600 | 0.85 | 33 | 2.7 | {cells} |" in capacity_section([row])


def test_results_that_are_not_there_leave_the_pages_alone(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("as it was")
    words = ("--results", str(tmp_path / "none"), "--page", str(page), "--front", str(page))
    with pytest.raises(SystemExit) as ended:
        plot.main(words)
    assert ended.value.code == 2
    assert page.read_text() == "as it was"


def test_the_page_says_how_others_ran(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    other = {**OTHERS, "command": "generate(dtype=bfloat16)", "note": "a part of a longer run"}
    (results / "a.json").write_text(json.dumps([ours(2, None), other]))
    write_page(results, tmp_path / "README.md")
    page = (tmp_path / "README.md").read_text()
    assert "\n- transformers async: generate(dtype=bfloat16)\n" in page
    assert "\n- transformers async: a part of a longer run\n" in page
