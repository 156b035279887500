"""A stand-in child process: says `ready`, drains on SIGTERM, and does wrong what it is told to.

Run as a file. Writes what happens to stderr, one word a line, and waits only in the kernel.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--alive", help="a FIFO held open for writing as long as this lives")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--status-at-start", type=int)
    parser.add_argument("--kill-self", action="store_true", help="right after ready")
    parser.add_argument("--deaf", action="store_true", help="notices SIGTERM, but stays")
    parser.add_argument("--status", type=int, default=0, help="at the end of the drain")
    parser.add_argument("--leave-child", action="store_true", help="that holds stderr open")
    arguments = parser.parse_args()

    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    if arguments.alive is not None:
        os.open(arguments.alive, os.O_WRONLY)
    if arguments.leave_child:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        leaf = subprocess.Popen(command)
        print(f"left {leaf.pid}", file=sys.stderr, flush=True)
        leaf.returncode = 0
    if arguments.status_at_start is not None:
        print("failing", file=sys.stderr, flush=True)
        return int(arguments.status_at_start)
    if not arguments.never_ready:
        with os.fdopen(arguments.ready_fd, "w") as pipe:
            pipe.write(f"ready at {os.getpid()}\n")
    if arguments.kill_self:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.sigwait(stops)
    print("draining", file=sys.stderr, flush=True)
    while arguments.deaf:
        signal.sigwait(stops)
    print("stopped", file=sys.stderr, flush=True)
    return int(arguments.status)


if __name__ == "__main__":
    sys.exit(main())
