"""How many cores torch's operations use, thread by thread.

Owns the rule that on a CPU one thread at a time has a team of workers. Called by loading and by the
CPU device.

Each thread that runs parallel operations has workers of its own (OpenMP's, as in libgomp). While
there are no more of them than cores, one that waits for the next operation spins; with more, all of
them sleep, each operation pays for waking them, and a step of a small model takes half again as
long. So the model is loaded in a thread that ends before the one that computes steps begins, and
other threads compute alone.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

ResultT = TypeVar("ResultT")


def use_cores(count: int) -> None:
    """Lets the calling thread's operations use `count` cores."""
    torch.set_num_threads(count)
    # A thread takes over the number when it first asks, and keeps it: so it asks now, before
    # another one sets another number.
    torch.get_num_threads()


def in_passing_thread(core_count: int, work: Callable[[], ResultT]) -> ResultT:
    """What `work` returns or raises, done in a thread whose workers end with it."""
    with ThreadPoolExecutor(1, initializer=use_cores, initargs=(core_count,)) as pool:
        return pool.submit(work).result()
