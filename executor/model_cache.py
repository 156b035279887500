"""A folder of things that are expensive to make: each is made once, whole or not at all.

Owns where the cache lies and how an entry comes into being. Knows nothing of models. Called by
`prepare` and `demo_model`.

::

    CACHE/NAME         a finished entry, never changed
    CACHE/NAME.part    an entry in the making; without a living maker it is rubbish
    CACHE/NAME.lock    held (flock) by the maker; stays, as unlinking a held lock is a race
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE_VARIABLE = "GAPLESS_CACHE"
FOLDER_MODE = 0o755
FILE_MODE = 0o644
"""Entries are public models; another container's user may read them."""


def default_cache() -> Path:
    """``$GAPLESS_CACHE``, else ``~/.cache/gapless``."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "gapless"


def made_once(entry: Path, make: Callable[[Path], None]) -> Path:
    """Returns `entry`, a folder; if it is not there, `make` fills it first.

    Safe against a second process that wants the same (it waits, then finds the entry) and against
    a kill at any moment (the entry appears by one rename; the rubbish goes at the next attempt).

    Args:
        entry: path of the folder.
        make: fills the empty folder it is given.

    Raises:
        OSError: the cache cannot be written.
        Exception: whatever `make` raises; the entry is absent then.
    """
    if entry.is_dir():
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _locked(entry.with_name(entry.name + ".lock")):
        if entry.is_dir():
            return entry
        part = entry.with_name(entry.name + ".part")
        if part.exists():
            shutil.rmtree(part)
        part.mkdir(mode=FOLDER_MODE)
        try:
            make(part)
            for path in part.iterdir():
                path.chmod(FILE_MODE)
        except BaseException:
            shutil.rmtree(part)
            raise
        part.rename(entry)
    return entry


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
