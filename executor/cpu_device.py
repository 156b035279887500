"""The device without an accelerator: one compute thread behind a queue.

Owns the compute thread, the staging slots and the output buffers. See `device` for the stages and
for what the CUDA form does in their place. What a step computes is the runner's business.

Memory is handed between the two threads by the queue (frames) and by `_landed` (results), never
shared at the same time: a staging slot belongs to the compute thread from `accept` until its step
is reported.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from gapless.executor.device import Device, Regions, StepError
from gapless.protos.messages import Epoch, StepNumber
from gapless.protos.seats import Int32s
from gapless.protos.slots import NO_CARRY, SLOT_COUNT, Frame, Result

StagedT = TypeVar("StagedT")


class Runner(Protocol[StagedT]):
    """What the device needs of a `StepRunner`; see there."""

    def no_tokens(self) -> Tensor: ...

    def stage(self, frame: Frame) -> StagedT: ...

    def apply_assignments(self, assignments: Int32s) -> None: ...

    def run(self, staged: StagedT, previous_tokens: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _StagingSlot(Generic[StagedT]):
    """The device's own copy of a frame: the step slot is not read again."""

    step: StepNumber
    row_count: int
    staged: StagedT
    assignments: Int32s
    accepted_ns: int


class CpuDevice(Device, Generic[StagedT]):
    """Runs steps on the CPU, in one thread."""

    def __init__(self, epoch: Epoch, regions: Regions, runner: Runner[StagedT]) -> None:
        """Starts the compute thread. The runner's seat copy has been uploaded."""
        self._epoch = epoch
        self._regions = regions
        self._runner = runner
        self._staging: list[_StagingSlot[StagedT] | None] = [None] * SLOT_COUNT
        self._outputs = [runner.no_tokens() for _ in range(SLOT_COUNT)]
        self._in_flight = 0
        self._last_step: StepNumber | None = None
        self._last_row_count = 0
        self._queue: SimpleQueue[_StagingSlot[StagedT] | None] = SimpleQueue()
        self._landed: deque[StepNumber | Exception] = deque()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Daemon: a process that is told to stop at once does not wait for a step.
        self._thread = threading.Thread(target=self._compute, name="compute", daemon=True)
        self._thread.start()

    @property
    def wakeup(self) -> int:
        return self._wakeup

    @property
    def in_flight(self) -> int:
        return self._in_flight

    # ---------------------------------------------------------------- I/O thread

    def accept(self, step: StepNumber) -> None:
        slot = step % SLOT_COUNT
        assert self._in_flight < SLOT_COUNT, f"step {step} is a third one in flight"
        assert self._last_step in (None, step - 1), f"step {step} follows {self._last_step}"
        assert self._staging[slot] is None, f"staging slot {slot} is still taken"
        frame = self._regions.frames.read(self._epoch, step)
        frame.check()
        self._check_carry(frame)
        staging = _StagingSlot(
            step=step,
            row_count=frame.row_count,
            staged=self._runner.stage(frame),
            assignments=frame.assignments.copy(),
            accepted_ns=time.monotonic_ns(),
        )
        self._staging[slot] = staging
        self._last_step, self._last_row_count = step, frame.row_count
        self._in_flight += 1
        self._queue.put(staging)

    def _check_carry(self, frame: Frame) -> None:
        carry_max = int(frame.rows.carry_row.max())
        if carry_max != NO_CARRY:
            assert self._last_step is not None, "the first step of an epoch carries nothing over"
            assert carry_max < self._last_row_count, (carry_max, self._last_row_count)

    def finished(self) -> tuple[StepNumber, ...]:
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            return ()
        steps: list[StepNumber] = []
        while self._landed:
            landed = self._landed[0]
            if isinstance(landed, Exception):
                if not steps:
                    raise StepError(f"{type(landed).__name__}: {landed}") from landed
                os.eventfd_write(self._wakeup, 1)  # the steps before it first, the fault next time
                break
            self._landed.popleft()
            self._staging[landed % SLOT_COUNT] = None
            self._in_flight -= 1
            steps.append(landed)
        return tuple(steps)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        os.close(self._wakeup)

    # ---------------------------------------------------------------- compute thread

    def _compute(self) -> None:
        while (staging := self._queue.get()) is not None:
            try:
                self._run(staging)
            except Exception as error:  # not swallowed: `finished` raises it in the I/O thread
                self._report(error)
                return
            self._report(staging.step)

    def _run(self, staging: _StagingSlot[StagedT]) -> None:
        started_ns = time.monotonic_ns()
        slot = staging.step % SLOT_COUNT
        output = self._outputs[slot][: staging.row_count]
        with torch.inference_mode():
            self._runner.apply_assignments(staging.assignments)
            tokens, faults = self._runner.run(staging.staged, self._outputs[1 - slot])
            output.copy_(tokens)
        finished_ns = time.monotonic_ns()
        self._regions.results.write(
            Result(
                epoch=self._epoch,
                step=staging.step,
                tokens=output.numpy(),
                faults=faults.numpy().astype(np.int32, copy=False),
                accepted_ns=staging.accepted_ns,
                started_ns=started_ns,
                finished_ns=finished_ns,
            )
        )

    def _report(self, landed: StepNumber | Exception) -> None:
        self._landed.append(landed)
        os.eventfd_write(self._wakeup, 1)
