"""What the step log of a scheduler process says of steps."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

from gapless.bench import bubbles
from gapless.protos.bubbles import DeviceTime
from gapless.protos.step_log import StepColumn, read_step_log
from tests.scheduler_process.rig import Rig


def test_each_step_is_written_down(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "steps.npy"
    gateway, _ = rig.serve("--step-log", str(path), "--depth", "1")
    handles = [gateway.submit(1, prompt_tokens=5, max_new_tokens=4)]
    rig.until(lambda: gateway.end(handles[0]) is not None)
    handles.append(gateway.submit(2, prompt_tokens=3, max_new_tokens=2))
    rig.until(lambda: gateway.end(handles[1]) is not None)
    rig.scheduler.send(signal.SIGTERM)
    assert rig.until_ended() == 0

    steps = read_step_log(path)
    assert steps["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert set(steps["epoch"]) == {1}
    assert steps["row_count"].tolist() == [1] * 6
    assert steps["token_count"].tolist() == [5, 1, 1, 1, 3, 1]
    assert steps["result_count"].tolist() == [1] * 6
    assert steps["context_tokens"].tolist() == [5, 6, 7, 8, 3, 4]
    # Work arrived twice at an empty server.
    assert (steps["idle_until_ns"] > 0).tolist() == [True, False, False, False, True, False]
    columns = [steps[column.name.lower()] for column in StepColumn if column >= 7]
    for earlier, later in itertools.pairwise(columns):
        assert (earlier <= later).all()
    assert (steps["taken_ns"][:-1] <= steps["built_from_ns"][1:]).all()
    assert steps["idle_until_ns"][4] >= steps["taken_ns"][3]


def test_statistics_agree_with_the_log(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "steps.npy"
    gateway, _ = rig.serve("--step-log", str(path))
    assert rig.stats(gateway).device_time == DeviceTime()
    for new_tokens in (7, 3):
        gateway.submit(new_tokens, prompt_tokens=5, max_new_tokens=new_tokens)
        found = rig.until_at_rest(gateway).device_time
    rig.scheduler.send(signal.SIGTERM)
    assert rig.until_ended() == 0

    steps = read_step_log(path)
    gaps = bubbles.gaps_of(steps)
    assert found.active_ns == (steps["finished_ns"] - steps["started_ns"]).sum()
    assert list(found.gap_ns) == gaps.parts_ns.sum(axis=0).tolist()
    assert found.gap_ns[0] > 0
    assert sum(found.bubble_counts) == len(steps) - 1


def test_a_place_that_cannot_be_written_is_refused_at_the_start(rig: Rig, tmp_path: Path) -> None:
    scheduler = rig.launch("--step-log", str(tmp_path / "none" / "steps.npy"))
    assert scheduler.wait() == 1
    assert "steps.npy" in scheduler.log()
