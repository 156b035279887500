"""The seeded world around a real core: gateways, clocks, an executor that is late, lost and found.

One `random.Random(seed)` decides everything; a failure's seed replays it. Frames go through real
slot memory and assignments through a real shared seat table. After every step the core checks its
invariants; `Ledger` judges the outcome against `model.continuation`.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from gapless.protos.messages import Cancel, CancelCause, Epoch, Handle, StepNumber, Stopping, Submit
from gapless.protos.sampling import Sampling
from gapless.protos.seats import Int32s
from gapless.protos.slots import FrameSlots, Result, ResultSlots
from gapless.scheduler.config import SAMPLING_WORDS_MAX, CoreConfig, GatewayIndex
from gapless.scheduler.core import Core
from gapless.scheduler.frames import apply_assignments
from tests.simulation.fake_executor import FakeExecutor, FakeMemory
from tests.simulation.ledger import Ledger
from tests.simulation.model import TEXTS, VOCAB_SIZE, vocabulary

GATEWAYS = (GatewayIndex(1), GatewayIndex(2), GatewayIndex(3))
TENANTS = ("north", "south")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What kind of world it is. Rates are chances per turn; a step takes a few turns."""

    depth: int = 2
    running_max: int = 8
    block_tokens: int = 4
    block_count: int = 40
    context_length: int = 96
    step_tokens_max: int = 24
    chunk_tokens_max: int = 7
    queued_max: int = 12
    queued_tokens_max: int = 300
    request_count: int = 120
    prompt_tokens_max: int = 40
    new_tokens_min: int = 1
    new_tokens_max: int = 60
    arrival_rate: float = 0.08
    cancel_rate: float = 0.02
    rewind_rate: float = 0.03
    loss_rate: float = 0.01
    fault_rate: float = 0.01
    gateway_loss_rate: float = 0.002
    clock_rate: float = 0.2
    """Share of requests with each kind of clock."""
    stop_rate: float = 0.4
    """Share of requests with stop tokens, and with stop strings."""

    checks_each_call: bool = True
    """Check the core's invariants after each call, not only once a step."""
    checks_each_step: bool = True

    def config(self) -> CoreConfig:
        """The core's limits in this world."""
        blocks = -(-self.context_length // self.block_tokens)
        return CoreConfig(
            running_max=self.running_max,
            queued_max=self.queued_max,
            queued_tokens_max=self.queued_tokens_max,
            depth=self.depth,
            step_tokens_max=self.step_tokens_max,
            chunk_tokens_max=self.chunk_tokens_max,
            row_max=self.running_max + 3,
            block_tokens=self.block_tokens,
            block_count=self.block_count,
            context_length=self.context_length,
            vocab_size=VOCAB_SIZE,
            assignment_max=self.running_max + SAMPLING_WORDS_MAX + blocks,
        )


def simulate(profile: Profile, seed: int) -> World:
    """Runs one world; a failure tells how to see it again."""
    world = World(profile, seed)
    try:
        world.run()
        world.ledger.judge()
    except BaseException as error:
        error.add_note(f"seed {seed}, after {world.step_count} steps of {profile}")
        raise
    return world


class World:
    """One simulation."""

    def __init__(self, profile: Profile, seed: int) -> None:
        self.profile = profile
        self.random = random.Random(seed)
        self.config = profile.config()
        self.core = Core(self.config, Epoch(1))
        self.core.set_vocabulary(vocabulary())
        self.ledger = Ledger(self.config.sequence_tokens_max)
        self.now = 1000.0
        self.memory = FakeMemory(profile.block_count, profile.block_tokens)
        self.late: list[Result] = []
        self.step_count = 0
        self.row_count = 0
        self.loss_count = 0
        self.submitted = 0
        self._done: list[StepNumber] = []
        self._happenings = (
            (profile.arrival_rate, self.submit),
            (profile.cancel_rate, self.cancel),
            (profile.rewind_rate, self.rewind),
            (profile.loss_rate, self.lose_executor),
            (profile.fault_rate, self.break_row),
            (profile.gateway_loss_rate, self.lose_gateway),
        )
        self._attach(Epoch(1))

    # ------------------------------------------------------------------ running it

    def run(self) -> None:
        """Faults first; then none, and everyone must finish; then all must be at rest."""
        turns = 0
        while self.submitted < self.profile.request_count:
            self.turn()
            turns += 1
            assert turns < 200 * self.profile.request_count, "requests are not accepted any more"
        for _ in range(400 * self.profile.request_count):
            if self.core.is_idle:
                break
            self.advance_step()
        assert self.core.is_idle, f"{self.core.stats(self.now)} after the faults have ceased"
        self.check_at_rest()

    def turn(self) -> None:
        """Something happens, and a step goes on."""
        dice = self.random.random()
        for rate, happen in self._happenings:
            if dice < rate:
                happen()
                self.settle()
                break
            dice -= rate
        self.advance_step()

    def advance_step(self) -> None:
        """Builds, runs or delivers, whatever the dice say among what is possible."""
        self.now += 0.001
        due = self.core.next_deadline()
        if due is not None and due <= self.now:
            self.core.tick(self.now)
            self.settle()
        dice = self.random.random()
        if dice < 0.5 and self.core.can_build():
            self.build()
        elif dice < 0.75 and self.executor.accepted:
            self._done.append(self.executor.run().step)
        elif self._done or self.executor.accepted:
            self.deliver()
        elif self.core.can_build():
            self.build()

    def build(self) -> None:
        """The shell's way: plan, table, slot, word."""
        frame = self.core.build(self.now)
        self.settle()
        if frame is None:
            return
        apply_assignments(self.table, frame.assignments)
        self.frames.write(frame)
        self.executor.accept(frame.step)

    def deliver(self) -> None:
        """The oldest result arrives; its step may run only now."""
        if not self._done:
            self._done.append(self.executor.run().step)
        step = self._done.pop(0)
        result = self.results.read(self.core.epoch, step)
        self.core.result(self.now, result)
        self.step_count += 1
        self.row_count += len(result.tokens)
        self.settle(is_step=True)

    def settle(self, *, is_step: bool = False) -> None:
        """After every call: invariants, freed cells, news."""
        profile = self.profile
        if profile.checks_each_step and (is_step or profile.checks_each_call):
            self.core.check()
        self.memory.poison_free(self.free_blocks())
        updates = self.core.take_updates()
        if updates:
            self.ledger.record(updates)

    # ------------------------------------------------------------------ what happens

    def submit(self) -> None:
        """A request arrives; every so often with an id that is taken, or too large to ever fit."""
        self.submitted += 1
        gateway = self.random.choice(GATEWAYS)
        word = self.request(Handle(self.submitted))
        self.ledger.expect(gateway, word)
        self.core.submit(self.now, gateway, word)

    def request(self, handle: Handle) -> Submit:
        """A random request."""
        dice, profile = self.random, self.profile
        new_tokens = dice.randint(profile.new_tokens_min, profile.new_tokens_max)
        prompt_tokens = dice.randint(1, profile.prompt_tokens_max)
        has_tokens, has_strings = (dice.random() < profile.stop_rate for _ in range(2))
        bias_count = dice.choice((0, 0, 0, 3))
        stopping = Stopping(
            max_new_tokens=new_tokens,
            min_new_tokens=dice.choice((0, 0, min(5, new_tokens))),
            stop_tokens=tuple(dice.sample(range(VOCAB_SIZE), dice.randint(1, 5)) * has_tokens),
            stop_strings=tuple(
                self._stop_string() for _ in range(dice.randint(1, 3) * has_strings)
            ),
            skip_special_tokens=dice.random() < 0.5,
            max_new_tokens_is_room=dice.random() < 0.2,
        )
        queue_s, deadline_s, limit_s = (
            dice.uniform(0.005, 0.3) if dice.random() < profile.clock_rate else None
            for _ in range(3)
        )
        is_id_taken = self.submitted > 1 and dice.random() < 0.02
        return Submit(
            handle=handle,
            request_id=f"r{handle - 1 if is_id_taken else handle}",
            tenant=TENANTS[0] if is_id_taken else dice.choice(TENANTS),
            prompt=np.array(dice.choices(range(VOCAB_SIZE), k=prompt_tokens), np.int32).tobytes(),
            sampling=Sampling(
                temperature=dice.choice((0.0, 1.0)),
                seed=dice.getrandbits(64),
                bias_tokens=tuple(range(bias_count)),
                bias_values=(1.0,) * bias_count,
            ),
            stopping=stopping,
            received_s=self.now,
            priority=dice.choice((0, 0, 0, -1, 2)),
            queue_timeout_s=queue_s,
            deadline_s=None if deadline_s is None else self.now + deadline_s,
            time_limit_s=limit_s,
        )

    def _stop_string(self) -> bytes:
        """Several tokens' text, less a bit at both ends."""
        text = b"".join(self.random.choice(TEXTS[4:]) for _ in range(4))
        return text[self.random.randint(0, 1) :][: self.random.randint(2, 6)]

    def cancel(self) -> None:
        """A client leaves, or CancelGenerate is called; the handle may have ended long ago."""
        handle = Handle(self.random.randint(max(1, self.submitted - 20), self.submitted + 1))
        if self.random.random() < 0.5:
            cause = self.random.choice(list(CancelCause))
            self.core.cancel(self.now, self.random.choice(GATEWAYS), Cancel((handle,), cause))
        else:
            tenant, name = self.random.choice(TENANTS), f"r{handle}"
            found = self.core.cancel_by_id(self.now, tenant, (name, "unknown"))
            assert found in ((), (name,)), found

    def rewind(self) -> None:
        """Someone is preempted out of the blue."""
        handle = Handle(self.random.randint(max(1, self.submitted - 20), self.submitted + 1))
        self.core.rewind(self.now, self.random.choice(GATEWAYS), handle)

    def break_row(self) -> None:
        """A row of the next step to run has no valid token: its sequence fails."""
        self.executor.fault_row = self.random.randrange(self.profile.running_max)

    def lose_gateway(self) -> None:
        """A gateway dies; nobody hears how its sequences end."""
        gateway = self.random.choice(GATEWAYS)
        self.core.gateway_gone(self.now, gateway)
        self.ledger.forget(gateway)

    def lose_executor(self) -> None:
        """It dies with some accepted steps done and others not; perhaps its memory as well."""
        self.loss_count += 1
        while self.executor.accepted and self.random.random() < 0.5:
            self._done.append(self.executor.run().step)
        late = [self.results.read(self.core.epoch, step) for step in self._done]
        keep_kv = self.random.random() < 0.5
        if not keep_kv:
            self.memory.poison_all()
        epoch = Epoch(self.core.epoch + 1)
        self.core.rewind_all(self.now, epoch, keep_kv=keep_kv)
        self._attach(epoch)
        for result in late:
            self.core.result(self.now, result)

    # ------------------------------------------------------------------ regions

    def _attach(self, epoch: Epoch) -> None:
        """New regions and a new executor on the old memory."""
        config = self.config
        self.frames = FrameSlots(config.frame_layout, bytearray(config.frame_layout.size_bytes))
        self.results = ResultSlots(config.result_layout, bytearray(config.result_layout.size_bytes))
        layout = config.seat_layout
        self.table: Int32s = layout.table(bytearray(layout.size_bytes))
        self.core.write_table(self.table)
        self.executor = FakeExecutor(
            config.attach(epoch),
            self.memory,
            self.frames,
            self.results,
            self.table,
            checks_all=self.profile.checks_each_call,
        )
        self._done = []

    def free_blocks(self) -> Int32s:
        return self.core._placement.blocks.free_numbers()

    def check_at_rest(self) -> None:
        """Everything that was taken is back; both copies of the seat table agree."""
        stats, placement = self.core.stats(self.now), self.core._placement
        assert stats.blocks_active == 0, stats
        assert stats.blocks_free == self.config.block_count - 1, stats
        assert stats.seats_active == stats.running_requests == 0, stats
        assert stats.queued_requests == stats.queued_tokens == 0, stats
        assert len(placement.waiting) == len(placement.yielding) == 0
        assert len(self.core._registry) == 0
        assert len(self.core._timers) == 0
        assert self.core.next_deadline() is None
        assert (self.executor.table == self.table).all(), "the device's seat table differs"
        self.core.check()
