"""The device without an accelerator: one compute thread behind a queue.

Owns the compute thread, the staging slots and the output buffers. See `device` for the stages and
for what the CUDA form does in their place. What a step computes is the runner's business.

Memory is handed between the two threads by the queue (frames) and by `_landings` (results), never
shared at the same time: a staging slot belongs to the compute thread from `accept` until its step
is reported.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from gapless.executor.cores import use_cores
from gapless.executor.device import Device, Landings, Regions, check_carry
from gapless.protos.messages import Epoch, StepNumber
from gapless.protos.seats import Int32s
from gapless.protos.slots import SLOT_COUNT, Frame, Result

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

    def __init__(
        self, epoch: Epoch, regions: Regions, runner: Runner[StagedT], core_count: int = 1
    ) -> None:
        """Starts the compute thread, for `core_count` cores.

        The runner's seat copy has been uploaded.
        """
        self._epoch = epoch
        self._regions = regions
        self._runner = runner
        self._core_count = core_count
        self._staging: list[_StagingSlot[StagedT] | None] = [None] * SLOT_COUNT
        self._outputs = [runner.no_tokens() for _ in range(SLOT_COUNT)]
        self._in_flight = 0
        self._last_step: StepNumber | None = None
        self._last_row_count: int | None = None
        self._queue: SimpleQueue[_StagingSlot[StagedT] | None] = SimpleQueue()
        self._landings = Landings()
        # Daemon: a process that is told to stop at once does not wait for a step.
        self._thread = threading.Thread(target=self._compute, name="compute", daemon=True)
        self._thread.start()

    @property
    def wakeup(self) -> int:
        return self._landings.wakeup

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
        check_carry(frame, self._last_row_count)
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

    def finished(self) -> tuple[StepNumber, ...]:
        steps = self._landings.take()
        for step in steps:
            self._staging[step % SLOT_COUNT] = None
            self._in_flight -= 1
        return steps

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._landings.close()

    # ---------------------------------------------------------------- compute thread

    def _compute(self) -> None:
        use_cores(self._core_count)
        while (staging := self._queue.get()) is not None:
            try:
                self._run(staging)
            except Exception as error:  # not swallowed: `finished` raises it in the I/O thread
                self._landings.tell(error)
                return
            self._landings.tell(staging.step)

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
