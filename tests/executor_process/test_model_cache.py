"""The cache of prepared models: one maker at a time, whole entries or none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gapless.executor.model_cache import default_cache, made_once

MAKER = """
import sys
from pathlib import Path
from gapless.executor.model_cache import made_once

def make(part):
    (part / "half").write_text("first half")
    print("making", flush=True)
    sys.stdin.readline()
    (part / "whole").write_text("second half")

print(made_once(Path(sys.argv[1]), make), flush=True)
"""


def start_maker(entry: Path) -> subprocess.Popen[str]:
    """A process in the middle of making `entry`, or waiting for its turn; a line lets it go on."""
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(entry)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(maker: subprocess.Popen[str]) -> str:
    assert maker.stdout is not None
    return maker.stdout.readline().strip()


def make_nothing(part: Path) -> None:
    raise AssertionError(f"{part} is made already")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    entry = tmp_path / "deep" / "entry"
    assert made_once(entry, lambda part: (part / "file").touch()) == entry
    assert made_once(entry, make_nothing) == entry
    assert names(entry) == ["file"]
    assert names(entry.parent) == ["entry", "entry.lock"]


def test_a_failed_maker_leaves_nothing(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        (part / "half").touch()
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        made_once(tmp_path / "entry", fail)
    assert names(tmp_path) == ["entry.lock"]


def test_a_killed_maker_leaves_no_half_made_entry(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    with start_maker(entry) as maker:
        assert line_of(maker) == "making"
        maker.kill()
    assert not entry.exists()
    made_once(entry, lambda part: (part / "file").touch())
    assert names(entry) == ["file"]
    assert names(tmp_path) == ["entry", "entry.lock"]


def test_of_two_makers_the_second_finds_the_entry(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    with start_maker(entry) as first:
        assert line_of(first) == "making"
        with start_maker(entry) as second:
            first.communicate("\n")
            assert first.returncode == 0
            # Had it made the entry too, it would have said so first.
            assert line_of(second) == str(entry)
            second.communicate()
            assert second.returncode == 0
    assert names(entry) == ["half", "whole"]


def test_the_cache_lies_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GAPLESS_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.setenv("GAPLESS_CACHE", "")
    assert default_cache() == Path.home() / ".cache" / "gapless"
