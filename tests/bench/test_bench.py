"""The whole command over real processes, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gapless.bench import options
from gapless.bench.outputs import require_writable
from gapless.protos.step_log import read_step_log
from tests.models import tiny_model_folder

pytestmark = pytest.mark.processes

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def bench(*words: str, program: tuple[str, ...] = ("-m", "gapless.bench")) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    found = subprocess.run(
        (sys.executable, *program, *words),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return found.returncode, found.stdout, found.stderr


def left_behind() -> set[Path]:
    return set(Path("/dev/shm").glob("gapless-bench-*"))


def test_both_depths_are_measured_and_compared(tmp_path: Path) -> None:
    folder, trace = tiny_model_folder(tmp_path / "model"), tmp_path / "trace.json"
    results, raw, before = tmp_path / "results.json", tmp_path / "raw", left_behind()
    status, out, err = bench(
        *("--model", str(folder), "--device", "cpu", "--batch", "3", "--prompt", "20"),
        *("--new", "12", "--repeats", "2", "--json", str(results), "--raw", str(raw)),
        *("--trace", str(trace), "--trace-steps", "5"),
    )
    assert status == 0, err
    assert "tokens: equal in all 4 runs" in out
    assert left_behind() <= before
    rows = json.loads(results.read_text())
    assert [row["mode"] for row in rows] == ["depth1", "depth1", "depth2", "depth2"]
    assert len({row["run_id"] for row in rows}) == 1
    for row in rows:
        check_row(row)
        assert row["equal_tokens"] == {"requests": 3, "of": 3}
        assert len(read_step_log(results.parent / row["steps_file"])) == 13
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name.startswith("build ") for name in names) == 2 * 5
    for depth in (1, 2):
        steps = read_step_log(raw / f"depth{depth}" / "steps.npy")
        # Two runs and the warm-up, each behind its gate; all prompts fit into one step.
        assert len(steps) == 2 * (12 + depth) + 2 * 3 + depth
        assert (steps["taken_ns"] > 0).all()


def check_row(row: dict[str, Any]) -> None:
    """Every field of the results, and that shares fill the whole."""
    assert row["system"] == "gapless"
    assert row["work"] == {"model": "model", "batch": 3, "prompt": 20, "new": 12}
    assert row["seconds"] > 0
    assert row["tokens_per_s"] == pytest.approx(3 * 12 / row["seconds"], rel=0.01)
    assert 0 < row["ms_per_step_p50"] <= row["ms_per_step_p99"]
    assert (row["step_count"], row["decode_step_count"]) == (12, 11)
    assert row["gpu"].startswith("none (CPU")
    assert row["versions"]["python"]
    assert row["command"].startswith("gapless bench --model")
    assert row["gpu_active"] + sum(row["bubble_share"].values()) == pytest.approx(1, abs=1e-4)
    assert row["bubble_ms"]["no_request"] == 0
    assert set(row["cpu_s"]) == {"scheduler", "executor", "bench"}
    assert row["floor_ms_per_step"] is None


def test_the_client_command_becomes_the_benchmark() -> None:
    status, out, _ = bench("bench", "--help", program=("-m", "gapless.client"))
    assert status == 0
    assert "--requests-file" in out
    assert "None" not in out


def test_a_model_that_does_not_exist_is_wrong_usage() -> None:
    status, _, err = bench("--model", "preset:none")
    assert status == 2
    assert "preset:none" in err


def test_a_process_that_ends_is_explained() -> None:
    before = left_behind()
    status, _, err = bench(
        "--model", "preset:tiny", "--device", "cpu", "--executor-args=--dtype nonsense"
    )
    assert status == 1
    assert "the executor ended with status 2 before it was ready" in err
    assert "nonsense" in err
    assert left_behind() <= before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--batch", "0"), "--batch: 0 is not between 1 and 2147483647"),
        (("--new", "x"), "--new: 'x' is no whole number"),
        (("--depth", "1,x"), "--depth: '1,x' is none of 1, 2, 1,2 and 2,1"),
        (("--start-timeout-s", "-1"), "--start-timeout-s: -1 is not more than 0"),
        (("--read-bandwidth-tb-s", "nan"), "--read-bandwidth-tb-s: nan is not more than 0"),
        (("--executor-args", "'"), '--executor-args: "\'": No closing quotation'),
        (("--dtype", "nonsense"), "--dtype: invalid choice: 'nonsense'"),
    ],
)
def test_wrong_usage_names_the_flag(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(["--model", "preset:tiny", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--trace"])
def test_a_file_that_cannot_be_written_is_said_before_anything_runs(
    flag: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    status, out, err = bench("--model", "preset:tiny", flag, str(tmp_path / "file" / "x.json"))
    assert (status, out) == (2, "")
    assert (
        err == f"gapless bench: cannot write {tmp_path}/file/x.json: {tmp_path}/file is no folder\n"
    )


def test_trying_a_file_leaves_no_trace_of_it(tmp_path: Path) -> None:
    new, old = tmp_path / "folder" / "new.json", tmp_path / "old.json"
    old.write_text("[]")
    for path in (None, new, old):
        require_writable(path)
    assert not new.exists()
    assert old.read_text() == "[]"
