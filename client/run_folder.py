"""The run folder of one server: sockets and shared regions, on tmpfs, gone when the server is.

Owns the lock in it: a file that the supervisor holds with flock as long as it lives, so a folder
whose lock is free belongs to a dead server and may be cleaned. Called by `serve`. Must not know
what the other processes put into it beyond the shape of the names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LOCK: Final = "supervisor.lock"
_PREFIX: Final = "gapless-"
_MODE: Final = 0o700


class RunFolderError(Exception):
    """The folder cannot be used; the message says why and what to do."""


def tmpfs_parent() -> Path:
    """Where fresh run folders go: memory-backed if the machine has such a place."""
    for candidate in ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR")):
        if candidate and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return Path(tempfile.gettempdir())


@contextlib.contextmanager
def run_folder(chosen: Path | None, parent: Path | None = None) -> Iterator[Path]:
    """A locked, empty run folder, removed at the end.

    Args:
        chosen: the folder to use; None for a fresh one in `parent`.
        parent: default: see `tmpfs_parent`. Folders of dead servers in it are removed first.

    Raises:
        RunFolderError: `chosen` is used by a live server, or holds something else.
    """
    if chosen is None:
        parent = parent or tmpfs_parent()
        remove_stale(parent)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    else:
        folder = chosen.absolute()
        _claim(folder)
    lock = _lock_new(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def remove_stale(parent: Path) -> None:
    """Removes fresh-style folders in `parent` whose server is dead."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            lock = _try_lock(folder)
        except OSError:
            continue  # of somebody else, or gone meanwhile
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _claim(folder: Path) -> None:
    """Makes `folder` exist and be empty, if it is nobody's."""
    try:
        folder.mkdir(mode=_MODE, parents=True)
        return
    except FileExistsError:
        pass
    except OSError as error:
        raise RunFolderError(f"cannot make run folder {folder}: {error.strerror}") from error
    try:
        lock = _try_lock(folder)
    except FileNotFoundError:
        if not folder.is_dir() or any(folder.iterdir()):
            raise RunFolderError(
                f"{folder} exists and is no run folder: choose another --run-folder"
            ) from None
        return
    except OSError as error:
        raise RunFolderError(f"cannot use run folder {folder}: {error.strerror}") from error
    if lock is None:
        raise RunFolderError(f"a live server uses run folder {folder}: choose another --run-folder")
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """The lock of an existing run folder, held; None if its server lives.

    Raises:
        FileNotFoundError: the folder has no lock file.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _lock_new(folder: Path) -> int:
    """A new lock file, held before it has its name: whoever sees it finds it locked.

    Raises:
        RunFolderError: another server was faster.
    """
    unnamed = folder / f"{LOCK}.{os.getpid()}"
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.link(unnamed, folder / LOCK)
    except FileExistsError:
        os.close(descriptor)
        raise RunFolderError(f"a live server uses run folder {folder}") from None
    finally:
        unnamed.unlink()
    return descriptor
