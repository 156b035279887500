"""The real core in a seeded world: tokens must be those of each sequence alone.

More seeds: ``GAPLESS_SIMULATION_SEEDS=100 pytest tests/simulation``.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import time
from collections.abc import Callable

import pytest

from gapless.protos.messages import FinishReason
from gapless.protos.reasons import Reason
from tests.simulation.ledger import FAILURES, REFUSALS
from tests.simulation.world import Profile, World, simulate

SEED_COUNT = int(os.environ.get("GAPLESS_SIMULATION_SEEDS", "1"))
POOLS = {
    "one-token blocks": Profile(block_tokens=1, block_count=97),
    "tight": Profile(block_tokens=4, block_count=26),
    "roomy": Profile(block_tokens=4, block_count=120),
    "large blocks": Profile(block_tokens=16, block_count=9),
}
CHUNKS = {"chunk 1": (1, 8), "chunk 7": (7, 24), "whole prompts": (64, 64)}
FAST = Profile(
    running_max=40,
    block_tokens=16,
    block_count=700,
    context_length=288,
    step_tokens_max=128,
    chunk_tokens_max=64,
    queued_max=200,
    queued_tokens_max=0,
    request_count=800,
    prompt_tokens_max=30,
    new_tokens_min=200,
    new_tokens_max=250,
    arrival_rate=0.08,
    cancel_rate=0.005,
    rewind_rate=0.005,
    loss_rate=0.0005,
    fault_rate=0.002,
    gateway_loss_rate=0.0005,
    clock_rate=0.05,
    stop_rate=0.1,
    checks_each_call=False,
)
"""Many rows; the invariants once a step."""


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("pool", POOLS)
def test_tokens_are_those_of_each_sequence_alone(pool: str, chunk: str, depth: int) -> None:
    chunk_tokens_max, step_tokens_max = CHUNKS[chunk]
    profile = dataclasses.replace(
        POOLS[pool],
        depth=depth,
        chunk_tokens_max=chunk_tokens_max,
        step_tokens_max=step_tokens_max,
    )
    for seed in range(SEED_COUNT):
        simulate(profile, seed)


def test_everything_that_can_happen_does_happen() -> None:
    """A simulation in which nobody is ever preempted or refused would prove little."""
    outcomes: collections.Counter[str] = collections.Counter()
    preemptions = losses = 0
    for seed in range(5):
        world = simulate(Profile(), 1000 + seed)
        outcomes += world.ledger.outcomes
        preemptions += world.core.stats(world.now).preemptions_total
        losses += world.loss_count
    expected = set(FinishReason) - {FinishReason.CONSTRAINT_COMPLETE}
    names = {each.name for each in (*expected, *REFUSALS, *FAILURES)}
    assert names <= set(outcomes), names - set(outcomes)
    assert preemptions > 20, preemptions
    assert losses > 20, losses


def test_many_rows_with_invariants_checked(record_property: Callable[[str, object], None]) -> None:
    world = World(FAST, seed=0)
    # As the scheduler's process has it: the collector does not run while steps do.
    gc.collect()
    gc.disable()
    try:
        began = time.process_time()
        world.run()
        steps_per_second = world.step_count / (time.process_time() - began)
    finally:
        gc.enable()
    record_property("steps_per_second", round(steps_per_second))
    print(
        f"{steps_per_second:.0f} steps/s of CPU time, {world.row_count / world.step_count:.1f} rows"
    )
    world.ledger.judge()
    assert world.step_count >= 3000, world.step_count
    assert world.row_count >= 32 * world.step_count, world.row_count / world.step_count
    assert world.ledger.outcomes[Reason.QUEUE_FULL.name] < 400, world.ledger.outcomes
