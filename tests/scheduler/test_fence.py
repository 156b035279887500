"""The fenced pool against a naive model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gapless.scheduler.fence import FencedPool


class FenceMachine(RuleBasedStateMachine):
    """Takes, gives back and acknowledges at random; the model keeps plain sets."""

    @initialize(count=st.integers(1, 20))
    def begin(self, count: int) -> None:
        self.pool = FencedPool(count)
        self.free = set(range(1, count + 1))
        self.taken: list[int] = []
        self.fenced: dict[int, int] = {}
        self.acknowledged = -1
        self.published = -1

    @rule(share=st.floats(0, 1))
    def take(self, share: float) -> None:
        count = int(share * len(self.free))
        if count:
            expected_next = self.pool.peek()
        numbers = self.pool.take(count).tolist()
        assert len(set(numbers)) == count
        assert set(numbers) <= self.free
        assert not count or expected_next in numbers
        self.free -= set(numbers)
        self.taken += numbers

    @rule()
    def publish(self) -> None:
        self.published += 1

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.taken)))
        last_step = data.draw(st.integers(-1, self.published))
        numbers, self.taken = self.taken[:count], self.taken[count:]
        column = np.array(numbers, np.int32)
        self.pool.retire(column, last_step)
        column[:] = 0  # The pool must have kept its own copy.
        if last_step <= self.acknowledged:
            self.free |= set(numbers)
        else:
            self.fenced |= dict.fromkeys(numbers, last_step)

    @precondition(lambda self: self.published > self.acknowledged)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        self.acknowledged = data.draw(st.integers(self.acknowledged, self.published))
        self.pool.acknowledge(self.acknowledged)
        opened = {each for each, step in self.fenced.items() if step <= self.acknowledged}
        self.free |= opened
        self.fenced = {each: step for each, step in self.fenced.items() if each not in opened}

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert set(self.pool.free_numbers().tolist()) == self.free
        assert sorted(self.pool.fenced_numbers().tolist()) == sorted(self.fenced)
        assert self.pool.free_count == len(self.free)
        assert self.pool.fenced_count == len(self.fenced)
        assert self.pool.taken_count == len(self.taken)


TestFence = FenceMachine.TestCase


def test_what_is_not_there_cannot_be_taken() -> None:
    pool = FencedPool(3)
    pool.take(2)
    with pytest.raises(AssertionError):
        pool.take(2)


def test_nothing_is_given_back_twice() -> None:
    pool = FencedPool(3)
    numbers = pool.take(3)
    pool.retire(numbers, last_step=-1)
    with pytest.raises(AssertionError, match="retired twice"):
        pool.retire(numbers, last_step=-1)


def test_acknowledgements_do_not_go_back() -> None:
    pool = FencedPool(3)
    pool.acknowledge(4)
    with pytest.raises(AssertionError):
        pool.acknowledge(3)
