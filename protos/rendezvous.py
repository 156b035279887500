"""Names in the run folder: one folder on tmpfs a server, shared by all of its processes.

::

    RUN/gateways.sock       scheduler binds ROUTER, each gateway connects DEALER
    RUN/executors.sock      scheduler binds ROUTER, the executor connects DEALER
    RUN/frames.E            two step slots; the scheduler writes          (E: epoch)
    RUN/seats.E             seat table; the scheduler writes
    RUN/results.E           two result slots; the executor writes
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from gapless.protos.messages import Epoch

SOCKET_PATH_BYTES_MAX = 107
"""sun_path of Linux, less its end mark."""
RUN_FOLDER_MODE = 0o700
REGION_MODE = 0o600


def gateways_endpoint(run_folder: Path) -> str:
    """ZeroMQ endpoint of the gateways' conversation."""
    return _endpoint(run_folder / "gateways.sock")


def executors_endpoint(run_folder: Path) -> str:
    """ZeroMQ endpoint of the executor's conversation."""
    return _endpoint(run_folder / "executors.sock")


def frames_path(run_folder: Path, epoch: Epoch) -> Path:
    return run_folder / f"frames.{epoch}"


def seats_path(run_folder: Path, epoch: Epoch) -> Path:
    return run_folder / f"seats.{epoch}"


def results_path(run_folder: Path, epoch: Epoch) -> Path:
    return run_folder / f"results.{epoch}"


def create_region(path: Path, size_bytes: int) -> mmap.mmap:
    """A new zeroed file at `path`, mapped for writing; an older one of that name is unlinked."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, REGION_MODE)
    try:
        os.ftruncate(descriptor, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def open_region(path: Path, size_bytes: int) -> mmap.mmap:
    """Maps an existing region that the other side created.

    Mapped for writing as well: CUDA can pin only writable mappings. Whoever is not the region's
    writer does not write.

    Raises:
        ValueError: the file is smaller than `size_bytes`.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        found = os.fstat(descriptor).st_size
        if found < size_bytes:
            raise ValueError(f"region {path} has {found} bytes, expected {size_bytes}")
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def _endpoint(path: Path) -> str:
    absolute = os.fspath(path.absolute())
    size = len(os.fsencode(absolute))
    if size > SOCKET_PATH_BYTES_MAX:
        raise ValueError(
            f"socket path {absolute!r} has {size} bytes, more than {SOCKET_PATH_BYTES_MAX}: "
            "choose a shorter run folder"
        )
    return f"ipc://{absolute}"
