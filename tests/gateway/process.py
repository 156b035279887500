"""Starting real gateway processes for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.gateway.harness import MODEL_NAME

RUN_MODULE = ("-m", "gapless.gateway")


def spawn(
    run_folder: Path, *options: str, entry: tuple[str, ...] = RUN_MODULE, ready_fd: int | None
) -> subprocess.Popen[bytes]:
    """A gateway with its model folder in the run folder; stdout and stderr are pipes."""
    arguments = [sys.executable, *entry, "--run-folder", os.fspath(run_folder)]
    arguments += ["--model", os.fspath(run_folder / "model"), "--model-name", MODEL_NAME]
    arguments += ["--lame-duck-s", "0", *options]
    inherited: tuple[int, ...] = ()
    if ready_fd is not None:
        arguments += ["--ready-fd", str(ready_fd)]
        inherited = (ready_fd,)
    return subprocess.Popen(
        arguments,
        pass_fds=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def start(
    run_folder: Path, *options: str, entry: tuple[str, ...] = RUN_MODULE
) -> tuple[subprocess.Popen[bytes], list[str]]:
    """A gateway that listens, and its addresses as the ready line names them."""
    read, write = os.pipe()
    process = spawn(run_folder, *options, entry=entry, ready_fd=write)
    os.close(write)
    with os.fdopen(read) as ready:
        line = ready.readline()
    word, *addresses = line.split() or [""]
    assert word == "ready", process.communicate(timeout=60)
    return process, addresses
