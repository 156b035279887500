"""Ties a process to the one that started it, then becomes the command it was given.

    python -I -S lifeline.py STARTER_PID COMMAND [ARGUMENT ...]

The kernel kills the command as soon as its starter ends, however it ends (``kill -9`` included).
Why so: a pipe that the children watch would need code in each of them, and code between fork and
exec (``preexec_fn``) can deadlock in a process that has threads, as one with gRPC has. The request
to the kernel survives exec, so a program in between does it without either. Linux only.

The starter must live on in the *thread* that started this process. Run as a file of its own, by
the supervisor; imports nothing of Gapless, so it costs a bare interpreter start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
COMMAND_NOT_FOUND = 127


def main(arguments: list[str]) -> int:
    starter, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.stderr.write(f"prctl failed: {os.strerror(ctypes.get_errno())}\n")
        return 1
    if os.getppid() != int(starter):
        # It ended before the request was made.
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
    return COMMAND_NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
