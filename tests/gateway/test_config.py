"""The command line of a gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapless.gateway.config import Config, parse

LEAST = ["--run-folder", "/r", "--model", "/m", "--model-name", "n", "--listen", "localhost:1"]


def test_what_is_not_said_has_its_one_default() -> None:
    assert parse(LEAST) == Config(Path("/r"), Path("/m"), "n", "localhost:1")


def test_what_is_said_counts() -> None:
    config = parse([*LEAST, "--allow-chat-template", "--slow-consumer-s", "3", "--reuse-port"])
    assert (config.allow_chat_template, config.slow_consumer_s) == (True, 3.0)
    assert config.reuse_port


@pytest.mark.parametrize(
    "wrong",
    [
        ["--flush-interval-ms", "1001"],
        ["--default-max-new-tokens", "0"],
        ["--drain-timeout-s", "nan"],
        ["--lame-duck-s", "-1"],
        ["--deadline-max-s", "2000001"],
    ],
)
def test_a_value_out_of_range_is_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse([*LEAST, *wrong])
    assert left.value.code == 2
    assert wrong[0] in capsys.readouterr().err
