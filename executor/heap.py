"""How malloc keeps memory between steps.

Owns the rule that what a step on a CPU frees, the next one gets, without the operating system.
Knows nothing of steps. Called by `__main__` before there are threads, and by loading once a model
stands.

A step allocates some megabytes, frees them, and the next one wants the same. By itself glibc gives
such memory back in between, depending on what lies beside it, and each page that comes again costs
a fault: up to thousands a step. Another libc has its own rules.
"""

from __future__ import annotations

import ctypes
from typing import Final

TRIM_THRESHOLD: Final = -1
MMAP_MAX: Final = -4
ARENA_MAX: Final = -8
"""Numbers of glibc's mallopt(3)."""
NEVER_BYTES: Final = 2**31 - 1
"""More than is ever free at the end of the heap."""


def use_one_heap() -> None:
    """Threads share one heap. Those of single threads are small, and are given back when empty."""
    _set(ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """From now on freed memory stays in the heap, and large pieces come from there too."""
    _set(TRIM_THRESHOLD, NEVER_BYTES)
    _set(MMAP_MAX, 0)


def _set(option: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(option, value)
