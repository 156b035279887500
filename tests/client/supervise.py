"""Runs a supervisor over stand-in children in a process of its own. usage: supervise.py FIFO

Prints `serving` once all are ready.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

from gapless.client.supervisor import Supervisor
from tests.client.test_supervisor import PLAN, child


async def serving(lines: Mapping[str, str]) -> None:
    print("serving", flush=True)
    await asyncio.Event().wait()


def main() -> int:
    commands = {name: child("--alive", sys.argv[1]) for name in ("scheduler", "executor")}
    commands["gateway"] = child("--alive", sys.argv[1], "--deaf")

    def report(name: str, line: str) -> None:
        print(f"{name}|{line}", file=sys.stderr, flush=True)

    return asyncio.run(Supervisor(PLAN, commands, report, serving).run())


if __name__ == "__main__":
    sys.exit(main())
