"""The device with a GPU: three streams, events between them, and graphs.

Owns the streams, the events, the pinned mappings and the order in which things are enqueued; see
`device` for the stages. What a step computes is `cuda_step`'s business, who waits for it the
`watcher`'s. All is done by the I/O thread, which enqueues a whole step in `accept`.

Why no slot is written too early: a frame for step N+2 comes only after the result of step N was
reported, that is, after everything that reads or writes slot N % 2 has ended.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from gapless.executor.cuda_step import STAMP_COUNT, CudaStep
from gapless.executor.device import Device, Regions, check_carry
from gapless.executor.watcher import Watcher
from gapless.protos.messages import Epoch, StepNumber
from gapless.protos.seats import Int32s
from gapless.protos.slots import SLOT_COUNT, Features, Frame, Int64s, Result

CLOCK_SAMPLES: Final = 32
FEATURES_AT_START: Final = (
    Features.NONE,
    Features.RANDOM,
    Features.RANDOM | Features.TRUNCATED,
)
"""What graphs are captured for at the start; it compiles all kernels but those of lists."""

log = logging.getLogger(__name__)


class CudaError(RuntimeError):
    """A CUDA call failed."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was accepted and has not landed."""

    step: StepNumber
    row_count: int
    accepted_ns: int


class _Upload:
    """Copies the first bytes of one piece of pinned memory to the device."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._whole = target, source
        self._part = target[:0], source[:0]

    def enqueue(self, size_bytes: int) -> None:
        """On the current stream. In most steps the size is that of the step before last."""
        target, source = self._part
        if len(target) != size_bytes:
            whole_target, whole_source = self._whole
            self._part = target, source = whole_target[:size_bytes], whole_source[:size_bytes]
        target.copy_(source, non_blocking=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """One slot: the mapped frame and result, both pinned, their like on the device, and events."""

    frame: _Upload
    """Header, rows and tokens."""
    assignments: _Upload
    results: Tensor
    """int32, on the device: stamps, tokens and faults."""
    landing: Tensor
    """int32, in the result slot: where they land in one piece."""
    stamps: Int64s
    """Of the landing, by the device's timer."""
    sampled: Int32s
    """Of the landing: tokens and faults, ``[2, row_max]``."""
    staged: torch.cuda.Event
    computed: torch.cuda.Event
    landed: torch.cuda.Event


class CudaDevice(Device):
    """Runs steps on one GPU."""

    def __init__(self, epoch: Epoch, regions: Regions, step: CudaStep, core_count: int = 1) -> None:
        """Pins the regions and captures the first graphs; takes seconds.

        `core_count`: what the process may use, see `protos.wakeful`.
        """
        self._epoch = epoch
        self._regions = regions
        self._step = step
        self._layout = regions.frames.layout
        self._h2d = torch.cuda.Stream()
        self._compute = torch.cuda.Stream()
        self._d2h = torch.cuda.Stream()
        self._pinned = _Pinned()
        self._slots = tuple(self._map_slot(slot) for slot in range(SLOT_COUNT))
        self._flights: deque[_Flight] = deque()
        self._last_step: StepNumber | None = None
        self._last_row_count: int | None = None
        self._capture_at_start()
        self._clock_offset_ns = _clock_offset_ns(step.slots[0].stamps)
        self._watcher = Watcher(core_count)

    @property
    def wakeup(self) -> int:
        return self._watcher.wakeup

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    # ---------------------------------------------------------------- start

    def _map_slot(self, slot: int) -> _Slot:
        frames, results = self._regions.frames, self._regions.results
        frame_bytes = frames.slot_bytes(slot)
        self._pinned.register(frame_bytes)
        self._pinned.register(results.slot_bytes(slot))
        memory, source = self._step.slots[slot], torch.from_numpy(frame_bytes)
        assignments_at, landing = self._layout.assignments_at, results.landing(slot)
        return _Slot(
            frame=_Upload(source[:assignments_at], memory.bytes[:assignments_at]),
            assignments=_Upload(source[assignments_at:], memory.bytes[assignments_at:]),
            results=memory.results,
            landing=torch.from_numpy(landing),
            stamps=landing[: 2 * STAMP_COUNT].view(np.int64),
            sampled=landing[2 * STAMP_COUNT :].reshape(2, -1),
            staged=torch.cuda.Event(),
            computed=torch.cuda.Event(),
            landed=torch.cuda.Event(blocking=True),
        )

    def _capture_at_start(self) -> None:
        pool_mib, took_ms = [], []
        for slot in range(SLOT_COUNT):
            for shape in self._step.buckets.at_start():
                took_ms.append(
                    self._timed(functools.partial(self._step.capture_forward, slot, shape))
                )
                for features in FEATURES_AT_START if shape.only_decodes else ():
                    sample = functools.partial(
                        self._step.capture_sample, slot, shape.rows, features
                    )
                    took_ms.append(self._timed(sample))
            pool_mib.append(self._step.graph_pool_bytes / (1 << 20))
        if not took_ms:  # the plain backend
            return
        log.info("graphs: %.1f MiB for one slot, %.1f MiB for both", *pool_mib)
        log.info(
            "capture: %.0f ms for the first size, which loads kernels, %.0f ms for each of %d more",
            *(took_ms[0], np.median(took_ms[1:]), len(took_ms) - 1),
        )

    def _timed(self, capture: Callable[[], None]) -> float:
        """Captures on the compute stream; how long that kept the host busy, in milliseconds."""
        begin_s = time.monotonic()
        with torch.cuda.stream(self._compute):
            capture()
        return 1e3 * (time.monotonic() - begin_s)

    # ---------------------------------------------------------------- I/O thread

    def accept(self, step: StepNumber) -> None:
        slot_index = step % SLOT_COUNT
        assert self.in_flight < SLOT_COUNT, f"step {step} is a third one in flight"
        assert self._last_step in (None, step - 1), f"step {step} follows {self._last_step}"
        frame = self._regions.frames.read(self._epoch, step)
        frame.check()
        check_carry(frame, self._last_row_count)
        self._make_ready(frame)
        serving = self._step.buckets.serving(frame)
        slot = self._slots[slot_index]
        torch.cuda.set_stream(self._h2d)
        slot.frame.enqueue(self._layout.tokens_at + 8 * frame.token_count)
        if len(frame.assignments):
            slot.assignments.enqueue(12 * len(frame.assignments))
        self._step.plan(frame, serving)
        slot.staged.record(self._h2d)
        accepted_ns = time.monotonic_ns()
        torch.cuda.set_stream(self._compute)
        self._compute.wait_event(slot.staged)
        self._step.run(frame, serving)
        slot.computed.record(self._compute)
        torch.cuda.set_stream(self._d2h)
        self._d2h.wait_event(slot.computed)
        slot.landing.copy_(slot.results, non_blocking=True)
        slot.landed.record(self._d2h)
        self._last_step, self._last_row_count = step, frame.row_count
        self._flights.append(_Flight(step, frame.row_count, accepted_ns))

    def _make_ready(self, frame: Frame) -> None:
        """Captures the graphs of a bucket that wants its own; takes some ten milliseconds, once."""
        if not self._step.buckets.wants_own(frame):
            return
        took_ms = self._timed(lambda: self._step.capture(frame))
        shape = (frame.row_count, frame.token_count)
        log.info("captured a step of %d rows and %d tokens in %.0f ms", *shape, took_ms)
        # Warm-up clears the slot's header on the compute stream; the upload comes after it.
        self._h2d.wait_stream(self._compute)

    def may_sleep(self) -> bool:
        if not self._flights:
            return True
        step = self._flights[0].step
        return self._watcher.may_sleep(step, self._slots[step % SLOT_COUNT].landed)

    def finished(self) -> tuple[StepNumber, ...]:
        steps = []
        while self._flights:
            step = self._flights[0].step
            if not self._watcher.has(self._slots[step % SLOT_COUNT].landed):
                break
            self._land(self._flights.popleft())
            steps.append(step)
        return tuple(steps)

    def close(self) -> None:
        self._watcher.close()
        torch.cuda.synchronize()
        while self._flights:
            self._land(self._flights.popleft())
        self._pinned.release()
        peak_bytes = torch.cuda.max_memory_reserved()
        log.info("peak device memory: %.2f GiB", peak_bytes / (1 << 30))

    def _land(self, flight: _Flight) -> None:
        """Completes the result slot of a step whose result has come."""
        slot = self._slots[flight.step % SLOT_COUNT]
        started_ns, finished_ns = slot.stamps.tolist()
        tokens, faults = slot.sampled[:, : flight.row_count]
        self._regions.results.write(
            Result(
                epoch=self._epoch,
                step=flight.step,
                tokens=tokens,
                faults=faults,
                accepted_ns=flight.accepted_ns,
                started_ns=started_ns + self._clock_offset_ns,
                finished_ns=finished_ns + self._clock_offset_ns,
            )
        )
        self._watcher.step_ended(finished_ns - started_ns)


class _Pinned:
    """Memory of this process that CUDA may copy from and to directly, while it is registered."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray[Any, Any]] = []

    def register(self, memory: np.ndarray[Any, Any]) -> None:
        status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(status) != 0:
            raise CudaError(f"cudaHostRegister of {memory.nbytes} bytes: error {int(status)}")
        self._arrays.append(memory)

    def release(self) -> None:
        for memory in self._arrays:
            torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
        self._arrays.clear()


def _clock_offset_ns(stamps: Tensor) -> int:
    """What to add to the GPU's timer to get CLOCK_MONOTONIC: the tightest of some samples.

    A stamp is taken between two readings of the host's clock; the truth is off by at most half the
    shortest distance between two such readings.
    """
    from gapless.executor import kernels

    best: tuple[int, int] | None = None
    for _ in range(CLOCK_SAMPLES):
        torch.cuda.synchronize()
        before = time.monotonic_ns()
        kernels.stamp(stamps, 0)
        torch.cuda.synchronize()
        after = time.monotonic_ns()
        offset = (before + after) // 2 - int(stamps[0])
        if best is None or after - before < best[0]:
            best = (after - before, offset)
    assert best is not None
    return best[1]
