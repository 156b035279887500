"""The whole command against a served model, on the CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gapless.bench.load_options import parse
from tests.bench.test_bench import bench
from tests.models import tiny_model_folder
from tests.processes.plans import tiny_plan
from tests.processes.server import Server, serve

pytestmark = pytest.mark.processes

RUNNING_MAX = 2
QUEUED_MAX = 4
"""Who follows right behind one that ends waits for its seat: so more than the closed loop has."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    plan = tiny_plan(tiny_model_folder(tmp_path_factory.mktemp("model")), gateway_count=1)
    limits = ("--running-max", str(RUNNING_MAX), "--queued-max", str(QUEUED_MAX))
    with serve(dataclasses.replace(plan, scheduler=limits)) as started:
        yield started


def load(server: Server, results: Path, *words: str) -> tuple[dict[str, Any], str]:
    status, out, err = bench(
        *("--server", server.addresses[0], "--admin", server.admin_addresses[0]),
        *("--prompt", "8", "--warm-up", "1", "--json", str(results), *words),
        program=("-m", "gapless.client", "bench"),
    )
    assert status == 0, err
    (row,) = json.loads(results.read_text())
    return dict(row), out


def test_a_closed_loop_gets_every_token(server: Server, tmp_path: Path) -> None:
    row, out = load(
        server,
        tmp_path / "results.json",
        *("--concurrency", "2", "--requests", "5", "--new", "6", "--flush-interval-ms", "0"),
        *("--target-ttft-ms", "60000", "--processes", "2"),
    )
    assert (row["mode"], row["requests"]) == ("closed", {"sent": 5, "completed": 5, "failed": {}})
    assert round(row["tokens_per_s"] * row["seconds"]) == 30
    assert row["goodput"]["share"] == 1.0
    assert row["generator"]["processes"] == 2
    assert 0 < row["added"]["device_ms_before_first_token"]["p50"] < row["ttft_ms"]["p50"]
    assert row["added"]["device_step_ms"]["p50"] > 0
    assert row["server"]["steps"] >= 6
    assert "5 of 5 completed" in out


def test_an_open_loop_keeps_its_times_and_counts_who_is_refused(
    server: Server, tmp_path: Path
) -> None:
    """All at once: so many run, so many wait, and each of the others is counted by its reason."""
    row, out = load(
        server,
        tmp_path / "results.json",
        *("--rate", "1e6", "--requests", "20", "--new", "300", "--no-text"),
    )
    requests = row["requests"]
    assert row["mode"] == "open"
    assert set(requests["failed"]) == {"RESOURCE_EXHAUSTED QUEUE_FULL"}
    assert requests["completed"] + sum(requests["failed"].values()) == 20
    assert requests["completed"] >= RUNNING_MAX
    assert "RESOURCE_EXHAUSTED QUEUE_FULL" in out


def test_requests_may_come_from_a_file(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text('{"prompt": [1, 2, 3], "new": 2}\n{"prompt": 5, "new": 3}\n')
    row, _ = load(
        server,
        tmp_path / "results.json",
        *("--concurrency", "1", "--requests-file", str(path), "--requests", "3"),
    )
    assert (row["work"]["prompt_tokens"], row["work"]["new_tokens"]) == (3 + 5 + 3, 2 + 3 + 2)
    assert row["requests"]["completed"] == 3


def test_nobody_at_the_address_is_one_line() -> None:
    status, out, err = bench("--server", "127.0.0.1:1", "--rate", "1")
    assert (status, out) == (3, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("gapless bench: no server at 127.0.0.1:1: ")


def test_a_wrong_admin_address_is_said_before_any_request(server: Server) -> None:
    words = ("--server", server.addresses[0], "--concurrency", "1")
    for wrong in ("127.0.0.1:1", server.addresses[0]):
        status, out, err = bench(*words, "--admin", wrong)
        assert (status, out) == (3, "")
        assert len(err.splitlines()) == 1
        assert err.startswith(f"gapless bench: no admin service at {wrong}: ")


def test_a_file_that_cannot_be_written_is_said_before_any_request(tmp_path: Path) -> None:
    status, out, err = bench("--server", "127.0.0.1:1", "--rate", "1", "--json", str(tmp_path))
    assert (status, out) == (2, "")
    assert err == f"gapless bench: cannot write {tmp_path}: it is a folder\n"


@pytest.mark.parametrize(
    "words",
    [
        ("--rate", "0"),
        ("--rate", "nan"),
        (),
        ("--rate", "1", "--concurrency", "1"),
        ("--rate", "1", "--seed", "-1"),
        ("--rate", "1", "--flush-interval-ms", "-1"),
    ],
)
def test_wrong_usage_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--server", "x", *words])
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err
