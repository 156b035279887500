"""Memory that was freed is not asked of the operating system again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, threading
from gapless.executor.heap import keep_freed_memory, use_one_heap

use_one_heap()
faults = []

def steps():
    keep_freed_memory()
    for _ in range(20):
        few, many = bytearray(1 << 20), bytearray(100 << 20)
        del few, many
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)

thread = threading.Thread(target=steps)
thread.start()
thread.join()
print(faults[-1] - faults[1])
"""
FAULTS_MAX = 1000
"""The pieces of one step alone have 25,856 pages."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc has its own rules")
def test_freed_memory_stays_for_the_next_step() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < FAULTS_MAX
