"""Run folders: locked by the living, cleaned of the dead."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapless.client.run_folder import LOCK, RunFolderError, remove_stale, run_folder


def test_a_fresh_folder_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    with run_folder(None, tmp_path) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "frames.1").write_bytes(b"x")
    assert not folder.exists()


def test_it_is_removed_after_an_error_too(tmp_path: Path) -> None:
    class WentWrongError(Exception):
        pass

    def use() -> None:
        with run_folder(tmp_path / "run"):
            raise WentWrongError

    with pytest.raises(WentWrongError):
        use()
    assert not (tmp_path / "run").exists()


def test_the_folder_of_a_live_server_is_refused_and_left_alone(tmp_path: Path) -> None:
    chosen = tmp_path / "run"
    with run_folder(chosen) as folder:
        (folder / "gateways.sock").touch()
        with pytest.raises(RunFolderError, match="live server"), run_folder(chosen):
            pass
        remove_stale(tmp_path)
        assert (folder / "gateways.sock").exists()


def leave_behind(folder: Path) -> None:
    """What a server leaves that was killed: its lock file, but not the lock."""
    folder.mkdir(mode=0o700)
    (folder / LOCK).touch()
    (folder / "seats.1").write_bytes(b"old")


def test_the_folder_of_a_dead_server_is_cleaned(tmp_path: Path) -> None:
    chosen = tmp_path / "run"
    leave_behind(chosen)
    with run_folder(chosen) as folder:
        assert [path.name for path in folder.iterdir()] == [LOCK]


def test_fresh_folders_of_dead_servers_are_removed(tmp_path: Path) -> None:
    leave_behind(tmp_path / "gapless-dead")
    (tmp_path / "gapless-unknown").mkdir()
    with run_folder(None, tmp_path) as live, run_folder(None, tmp_path) as second:
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"gapless-unknown", live.name, second.name}


def test_a_folder_that_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(RunFolderError, match="no run folder"), run_folder(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "x"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    chosen = tmp_path / "empty"
    chosen.mkdir()
    with run_folder(chosen) as folder:
        assert (folder / LOCK).exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot"), run_folder(tmp_path / "file" / "run"):
        pass
