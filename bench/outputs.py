"""Files that a measurement writes at its end: found to be writable before it begins.

Called by `__main__`, `load` and the programs in ``benchmarks/``.
"""

from __future__ import annotations

import os
from pathlib import Path


class OutputError(Exception):
    """A file cannot be written; the message is for the person who named it."""


def require_writable(path: Path | None) -> None:
    """Makes the folders above `path` and leaves no other trace; None is no file.

    Raises:
        OutputError: nothing can be written there.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
            path.unlink()
    except FileExistsError as error:
        raise OutputError(f"cannot write {path}: {path.parent} is no folder") from error
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder")
    if path.exists() and not os.access(path, os.W_OK):
        raise OutputError(f"cannot write {path}: no permission")
