"""What ``benchmarks.gateway_capacity`` says of wrong options, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gateway_capacity


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--streams", "3"), "--streams: 3 is less than 6"),
        (("--steps", "0"), "--steps: 0 is not between 1 and"),
        (("--steps", "9000"), "--steps: 9000 is more than"),
        (("--flush-ms", "20,x"), "--flush-ms: 'x' is no whole number"),
        (("--flush-ms", "1001"), "--flush-ms: 1001 is more than 1000"),
        (("--step-ms", "0"), "--step-ms: 0 is not more than 0"),
    ],
)
def test_wrong_usage_names_the_flag(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gateway_capacity.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gateway_capacity.main(["--json", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("it is a folder\n")


def test_without_the_client_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gateway_capacity.main([]) == 1
    assert "nghttp2-client" in capsys.readouterr().err
