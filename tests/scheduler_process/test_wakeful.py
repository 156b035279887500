"""A scheduler that stays awake for results, and sleeps where nothing is near."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.scheduler_process.players import FACTS, Executor, Gateway, stream_of
from tests.scheduler_process.rig import Rig

pytestmark = pytest.mark.processes

ON_MANY_CORES = """
import os, sys
from gapless.protos import wakeful
from gapless.scheduler.__main__ import main
os.sched_getaffinity = lambda _process: set(range(wakeful.CORES_MIN))
wakeful.SHORT_STEP_NS = 10**15
sys.exit(main(sys.argv[3:]))
"""
"""Instead of ``-m gapless.scheduler``: no step is long, and no result late."""
AWAKE_TICKS = 20
"""Of processor time: much more than a scheduler takes that waits for a minute."""


def serve(rig: Rig, device: str) -> tuple[Gateway, Executor]:
    """Like `Rig.serve`, with two steps in flight and one result taken."""
    rig.start(interpreter=("-c", ON_MANY_CORES))
    gateway, executor = rig.gateway(), Executor(rig.context, rig.run_folder)
    rig.players.append(executor)
    executor.greet(msgspec.structs.replace(FACTS, device=device))
    executor.latched = True
    rig.until(lambda: bool(gateway.welcomes))
    gateway.submit(3)
    rig.until(lambda: len(executor.accepted) == 2)
    executor.finish_one()
    rig.until(lambda: len(executor.accepted) == 3)
    return gateway, executor


def state_and_ticks(rig: Rig) -> tuple[str, int]:
    stat = Path(f"/proc/{rig.scheduler.process.pid}/stat").read_text()
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def test_it_is_awake_while_a_short_step_is_in_flight(rig: Rig) -> None:
    gateway, executor = serve(rig, "cuda")
    _, before = state_and_ticks(rig)
    rig.until(lambda: state_and_ticks(rig)[1] >= before + AWAKE_TICKS)
    assert rig.stats(gateway).running_requests == 1, "it hears everyone meanwhile"
    executor.latched = False
    rig.until_at_rest(gateway)
    (tokens,) = gateway.tokens.values()
    assert tokens == stream_of(3, 5, 10)
    rig.until(lambda: state_and_ticks(rig)[0] == "S")


def test_it_sleeps_where_the_cores_are_needed_for_computing(rig: Rig) -> None:
    serve(rig, "cpu")
    rig.until(lambda: state_and_ticks(rig)[0] == "S")
