"""Names and regions in a run folder: the limits, the modes, who sees whose bytes."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gapless.protos import rendezvous
from gapless.protos.messages import Epoch

ENDPOINTS = [rendezvous.gateways_endpoint, rendezvous.executors_endpoint]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_longest_socket_path_is_accepted_and_one_more_byte_refused(
    endpoint: Callable[[Path], str],
) -> None:
    socket_name = endpoint(Path("/")).removeprefix("ipc:///")
    room = rendezvous.SOCKET_PATH_BYTES_MAX - len(f"//{socket_name}")
    longest = Path("/" + "r" * room)
    path = endpoint(longest).removeprefix("ipc://")
    assert len(path) == rendezvous.SOCKET_PATH_BYTES_MAX
    with pytest.raises(ValueError, match="shorter run folder"):
        endpoint(Path(f"{longest}r"))


def test_the_limit_counts_bytes_not_characters() -> None:
    with pytest.raises(ValueError, match="shorter run folder"):
        rendezvous.gateways_endpoint(Path("/" + "한" * 40))


def test_endpoints_are_absolute_and_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = {endpoint(Path("run")) for endpoint in ENDPOINTS}
    assert found == {f"ipc://{tmp_path}/run/{name}.sock" for name in ("gateways", "executors")}


def test_regions_are_named_by_epoch(tmp_path: Path) -> None:
    names = {
        name(tmp_path, Epoch(epoch))
        for name in (rendezvous.frames_path, rendezvous.seats_path, rendezvous.results_path)
        for epoch in (1, 2)
    }
    assert len(names) == 6


def test_a_region_is_shared_zeroed_and_private_to_its_user(tmp_path: Path) -> None:
    path = tmp_path / "region"
    ours = rendezvous.create_region(path, 4096)
    theirs = rendezvous.open_region(path, 4096)
    assert stat.S_IMODE(path.stat().st_mode) == rendezvous.REGION_MODE
    assert ours[:] == bytes(4096)
    ours[7] = 42
    assert theirs[7] == 42


def test_a_region_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "region"
    older = rendezvous.create_region(path, 4096)
    older[0] = 1
    newer = rendezvous.create_region(path, 8192)
    assert newer[:] == bytes(8192)
    assert older[0] == 1, "whoever still maps the older one is not disturbed"


def test_a_region_that_is_too_small_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "region"
    rendezvous.create_region(path, 4096)
    with pytest.raises(ValueError, match="has 4096 bytes, expected 4097"):
        rendezvous.open_region(path, 4097)
    with pytest.raises(FileNotFoundError):
        rendezvous.open_region(tmp_path / "other", 1)
