"""The executor process: ``python -m gapless.executor``.

Owns the order of start and end, and the exit status: 0 after Stop (or SIGTERM before any step), 1
if it broke, 2 if whoever started it must change something, 3 if the scheduler is gone, 130 if it
was told to leave at once. Called by `gapless serve`, by a container, by hand.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence

from gapless.executor.config import LOG_FORMAT, Config, UserError, parse
from gapless.executor.heap import use_one_heap
from gapless.executor.phases import Phases
from gapless.executor.signals import Signals

USER_ERROR_STATUS = 2
SPIN_COUNT = 10000
"""How often a worker of torch's looks for the next operation before it sleeps: some 250 µs.

That is longer than the calls between two products take, so that workers are awake for the next one;
waking them a hundred times a step took a fifth of it. libgomp's own number is good for
milliseconds. When somebody else needs a core as well, a worker that spins so long keeps it from the
one that all wait for: steps took ten times as long.
"""

log = logging.getLogger("gapless.executor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the process; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT.format(process="executor"))
    phases = Phases()
    try:
        return _serve(parse(arguments), phases)
    except UserError as error:
        log.error("%s", error)
        return USER_ERROR_STATUS


def _serve(config: Config, phases: Phases) -> int:
    use_one_heap()
    signals = Signals()
    gc.disable()  # a start makes much that stays: collections cost a seventh of the imports
    log.info("importing torch and transformers ...")
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # read when torch is imported
    # Not before the flags are known to be right: these take seconds.
    from gapless.executor.link import Ending, Link
    from gapless.executor.loading import load

    phases.end("imports")
    loaded = load(config, phases)
    signals.serve()
    link = Link(
        config.run_folder,
        signals,
        loaded.facts,
        loaded.start_device,
        lambda: _announce(config.ready_fd, phases),
    )
    log.info("waiting for the scheduler in %s", config.run_folder)
    ending = link.run()
    link.close()
    signals.ignore()
    if ending is not Ending.DONE:
        # A step may still be running and nobody wants its result: do not wait for its thread.
        logging.shutdown()
        os._exit(ending)
    return ending


def _announce(ready_fd: int | None, phases: Phases) -> None:
    # What stands now stays: a collection between two steps must not walk it.
    gc.collect()
    gc.freeze()
    gc.enable()
    phases.end("garbage")
    log.info("%s", phases.line())
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as file:
            file.write("ready\n")


if __name__ == "__main__":
    sys.exit(main())
