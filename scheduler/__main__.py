"""The scheduler process: ``python -m gapless.scheduler --run-folder R``.

Owns the process: its command line, log, run folder, context and exit status. One thread (and
ZeroMQ's I/O thread). SIGTERM (or SIGINT) drains and exits 0; a second signal stops at once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import zmq

from gapless.protos import rendezvous
from gapless.scheduler import options
from gapless.scheduler.executors import Executors
from gapless.scheduler.gateways import Gateways
from gapless.scheduler.loop import Loop
from gapless.scheduler.options import Options
from gapless.scheduler.signals import Signals
from gapless.scheduler.step_log import StepLog

log = logging.getLogger("gapless.scheduler")

LOG_FORMAT: Final = "%(asctime)s scheduler %(levelname)s %(message)s"
LINGER_MS: Final = 2000
"""How long last words may take to leave at the end."""
EXIT_NOT_STARTED: Final = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a scheduler to its end; the exit status, see `loop.Ending`."""
    chosen = options.parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    signals = Signals()
    try:
        lock = _own(chosen.run_folder)
        try:
            return _serve(chosen, signals)
        finally:
            os.close(lock)
    except (OSError, zmq.ZMQError) as error:
        log.error("cannot serve in the run folder %s: %s", chosen.run_folder, error)
        return EXIT_NOT_STARTED


def _serve(chosen: Options, signals: Signals) -> int:
    step_log = None if chosen.step_log is None else StepLog(chosen.step_log)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        gateways = Gateways(context, chosen.run_folder)
        executors = Executors(context, chosen.run_folder)
        try:
            loop = Loop(chosen, gateways, executors, signals, step_log)
            log.info("bound in %s", chosen.run_folder)
            _announce(chosen.ready_fd)
            return loop.run()
        finally:
            executors.close(LINGER_MS)
            gateways.close(LINGER_MS)
            if step_log is not None:
                step_log.save()
    finally:
        context.term()


def _own(run_folder: Path) -> int:
    """Makes the folder if there is none, and locks it: ZeroMQ would let a second one take over.

    Raises:
        OSError: it cannot be made, or another scheduler has it.
    """
    run_folder.mkdir(mode=rendezvous.RUN_FOLDER_MODE, parents=True, exist_ok=True)
    lock = os.open(run_folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise OSError("another scheduler uses it") from None
    return lock


def _announce(ready_fd: int | None) -> None:
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as ready:
            ready.write("ready\n")


if __name__ == "__main__":
    sys.exit(main())
