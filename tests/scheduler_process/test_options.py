"""The command line: defaults, what is refused, and that the reason is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gapless.scheduler import options
from gapless.scheduler.options import Options
from tests.scheduler_process.players import FACTS


def test_only_the_run_folder_is_required() -> None:
    assert options.parse(["--run-folder", "/run/gapless"]) == Options(
        run_folder=Path("/run/gapless")
    )


def test_every_option_has_a_flag() -> None:
    chosen = {
        "run_folder": "/r",
        "depth": 1,
        "running_max": 2,
        "queued_max": 3,
        "queued_tokens_max": 4,
        "step_tokens_max": 6,
        "chunk_tokens_max": 5,
        "drain_timeout_s": 0.5,
        "step_log": "/l.npy",
        "ready_fd": 7,
    }
    assert set(chosen) == {field.name for field in dataclasses.fields(Options)}
    flags = [
        text
        for name, value in chosen.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    parsed = dataclasses.asdict(options.parse(flags))
    assert parsed == {**chosen, "run_folder": Path("/r"), "step_log": Path("/l.npy")}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "--run-folder"),
        (["--run-folder", "/r", "--depth", "3"], "--depth"),
        (["--run-folder", "/r", "--running-max", "0"], "0 is not between 1"),
        (["--run-folder", "/r", "--queued-max", "many"], "'many' is not a whole number"),
        (["--run-folder", "/r", "--queued-tokens-max", "-1"], "-1 is not between 0"),
        (["--run-folder", "/r", "--step-tokens-max", str(2**31)], "is not between"),
        (["--run-folder", "/r", "--drain-timeout-s", "soon"], "'soon' is not a number"),
        (["--run-folder", "/r", "--drain-timeout-s", "nan"], "nan is not a duration"),
        (["--run-folder", "/r", "--drain-timeout-s", "-1"], "-1 is not a duration"),
        (
            ["--run-folder", "/r", "--step-tokens-max", "4", "--chunk-tokens-max", "5"],
            "--chunk-tokens-max 5 is more than --step-tokens-max 4",
        ),
        (["--run-folder", "/" + "r" * 107], "choose a shorter run folder"),
        (["--run-folder", "/r", "--queue", "1"], "unrecognized arguments"),
    ],
)
def test_a_wrong_command_line_says_why(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        options.parse(flags)
    assert error.value.code == 2
    assert reason in capsys.readouterr().err


def test_a_core_is_sized_by_options_and_executor() -> None:
    chosen = Options(run_folder=Path("/r"), running_max=100, step_tokens_max=20, depth=1)
    config = chosen.core_config(FACTS)
    assert config.running_max == FACTS.row_max
    assert config.step_tokens_max == config.chunk_tokens_max == 20
    assert config.depth == 1
