"""Numbered things that a step in flight may still touch: KV blocks and seats, under the fence.

Owns who is free and who waits for a result. It must not know what the numbers stand for, nor who
holds the ones that were taken. `placement.py` has one pool of blocks and one of seats::

    free ──take──▶ taken ──retire(last_step)──▶ fenced ──acknowledge(step >= last_step)──▶ free
"""

from __future__ import annotations

import numpy as np

from gapless.protos.seats import Int32s


class FencedPool:
    """The numbers 1..count. Zero is scratch and never handed out.

    Free numbers stand on a stack, so that what was freed last is used first and a batch of them is
    taken with one slice.
    """

    def __init__(self, count: int) -> None:
        assert count >= 1, count
        self.count = count
        self._stack: Int32s = np.arange(count, 0, -1, dtype=np.int32)
        self._free_count = count
        self._fenced: dict[int, list[Int32s]] = {}
        self._fenced_count = 0
        self.acknowledged_step = -1
        """All steps up to this one have their results."""

    @property
    def free_count(self) -> int:
        return self._free_count

    @property
    def fenced_count(self) -> int:
        """Given back, but a step in flight may still touch them."""
        return self._fenced_count

    @property
    def taken_count(self) -> int:
        return self.count - self._free_count - self._fenced_count

    def take(self, count: int) -> Int32s:
        """Takes `count` free numbers, int32 ``[count]``; the caller has looked at `free_count`."""
        assert 0 <= count <= self._free_count, (count, self._free_count)
        self._free_count -= count
        return self._stack[self._free_count : self._free_count + count].copy()

    def peek(self) -> int:
        """The number that the next `take` of one hands out."""
        assert self._free_count > 0, "nothing is free"
        return int(self._stack[self._free_count - 1])

    def retire(self, numbers: Int32s, last_step: int) -> None:
        """Gives `numbers` back; they are free once the result of `last_step` has arrived.

        `last_step` is the last step that may touch any of them.
        """
        if last_step <= self.acknowledged_step:
            self._push(numbers)
        elif len(numbers):
            self._fenced.setdefault(last_step, []).append(numbers.copy())
            self._fenced_count += len(numbers)

    def acknowledge(self, step: int) -> None:
        """The results of `step` and of all steps before it have arrived (or never will)."""
        assert step >= self.acknowledged_step, (step, self.acknowledged_step)
        self.acknowledged_step = step
        if not self._fenced:
            return
        for last_step in [each for each in self._fenced if each <= step]:
            for numbers in self._fenced.pop(last_step):
                self._fenced_count -= len(numbers)
                self._push(numbers)

    def free_numbers(self) -> Int32s:
        """The free numbers, int32 ``[free_count]``; a view that the next call invalidates."""
        return self._stack[: self._free_count]

    def fenced_numbers(self) -> Int32s:
        """The fenced numbers, int32 ``[fenced_count]``."""
        batches = [numbers for batch in self._fenced.values() for numbers in batch]
        return np.concatenate(batches) if batches else np.empty(0, np.int32)

    def check(self) -> None:
        """Asserts the counts and that every fence is still ahead."""
        assert 0 <= self._free_count <= self.count, (self._free_count, self.count)
        assert self.taken_count >= 0, (self._free_count, self._fenced_count, self.count)
        assert all(step > self.acknowledged_step for step in self._fenced), (
            f"fences {list(self._fenced)} behind the acknowledged step {self.acknowledged_step}"
        )

    def _push(self, numbers: Int32s) -> None:
        free_count = self._free_count + len(numbers)
        assert free_count <= self.count, f"{free_count} free of {self.count}: retired twice"
        self._stack[self._free_count : free_count] = numbers
        self._free_count = free_count
