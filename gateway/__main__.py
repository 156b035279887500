"""Entry point of a gateway process: ``python -m gapless.gateway``."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys

from gapless.gateway.config import Config, parse
from gapless.gateway.event_loop import EventLoop
from gapless.gateway.model import ServedModel
from gapless.gateway.server import Gateway
from gapless.gateway.vocabulary import UnsupportedTokenizer

EXIT_CANNOT_START = 1

_LOG = logging.getLogger("gapless.gateway")


def main() -> int:
    """Runs a gateway; returns its exit code."""
    config = parse()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s gateway %(levelname)s %(message)s",
    )
    try:
        model = ServedModel.load(config.model_folder, config.model_name)
    except (OSError, ValueError, UnsupportedTokenizer) as error:
        _LOG.error("cannot serve %s: %s", config.model_folder, error)
        return EXIT_CANNOT_START
    # The vocabulary is some hundred thousand objects that never go: no collection need walk them.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(_serve(config, model))


async def _serve(config: Config, model: ServedModel) -> int:
    gateway = Gateway(config, model)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, gateway.stop)
    loop.add_signal_handler(signal.SIGINT, gateway.stop)
    try:
        await gateway.start()
    except OSError as error:
        _LOG.error("%s", error)
        await gateway.close()
        return EXIT_CANNOT_START
    _LOG.info("listening on %s", " and ".join(gateway.addresses))
    if config.ready_fd is not None:
        with os.fdopen(config.ready_fd, "w") as ready:
            ready.write(f"ready {' '.join(gateway.addresses)}\n")
    code = await gateway.run()
    # Decided: a signal that comes while the interpreter shuts down must not change it.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
