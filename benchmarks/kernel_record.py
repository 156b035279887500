"""Steps of the real device under torch's profiler: which kernels ran, and when.

Owns the recording and its division into steps. Every step begins and ends with a stamp kernel, so
the profiler's own record tells where it begins and ends, and nothing has to be said about two
clocks. Called by `check_stamps` and `profile_step`, which need a GPU; everything but `record` and
`make_ready` is plain arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import torch

from gapless.executor.arenas import PlainArenas
from gapless.executor.attention_backends import available_backends
from gapless.executor.model import Model
from gapless.executor.presets import preset_config
from gapless.protos.slots import SLOT_COUNT, Features
from tests.gpu.serving import CudaServer, StepStamps, head_shape

STAMP_KERNEL: Final = "_stamp"
OTHER_STREAMS: Final = ("Memcpy HtoD", "Memcpy DtoH")
"""Copies that run beside the steps, on streams of their own."""
NO_WORK: Final = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")
"""What some profilers tell beside kernels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel (or copy within the device) as the profiler saw it, on its own clock."""

    name: str
    begin_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        return self.end_us - self.begin_us


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step: what the stamps say, and what the profiler saw from stamp to stamp."""

    stamps: StepStamps
    kernels: tuple[Kernel, ...]
    """In the order of their beginning; the stamps are the first and the last."""

    @property
    def is_decode(self) -> bool:
        """Whether it only decodes, and so ran as graphs."""
        return self.stamps.row_count == self.stamps.token_count

    @property
    def stamped_us(self) -> float:
        """From stamp to stamp, by the GPU's timer."""
        return (self.stamps.finished_ns - self.stamps.started_ns) / 1e3

    @property
    def profiled_us(self) -> float:
        """From the beginning of the first kernel to the end of the last, by the profiler."""
        return max(kernel.end_us for kernel in self.kernels) - self.kernels[0].begin_us

    def busy_us(self) -> float:
        """How long at least one kernel ran."""
        return self.profiled_us - sum(self.holes_us())

    def own_us(self) -> list[float]:
        """For each kernel, how long it ran after all kernels before it had ended."""
        own = []
        end_us = self.kernels[0].begin_us
        for kernel in self.kernels:
            own.append(max(kernel.end_us - max(kernel.begin_us, end_us), 0.0))
            end_us = max(end_us, kernel.end_us)
        return own

    def holes_us(self) -> list[float]:
        """The times within the step in which no kernel ran."""
        holes = []
        end_us = self.kernels[0].end_us
        for kernel in self.kernels[1:]:
            if kernel.begin_us > end_us:
                holes.append(kernel.begin_us - end_us)
            end_us = max(end_us, kernel.end_us)
        return holes


def divide(kernels: Sequence[Kernel], stamps: Sequence[StepStamps]) -> list[RecordedStep]:
    """Kernels, in any order, as steps; `stamps` are of all steps that ran, in order."""
    ordered = sorted(kernels, key=lambda kernel: (kernel.begin_us, kernel.end_us))
    marks = [k for k, kernel in enumerate(ordered) if kernel.name.startswith(STAMP_KERNEL)]
    assert len(marks) == 2 * len(stamps), f"{len(marks)} stamp kernels of {len(stamps)} steps"
    return [
        RecordedStep(each, tuple(ordered[first : last + 1]))
        for each, first, last in zip(stamps, marks[::2], marks[1::2], strict=True)
    ]


def load(preset: str) -> tuple[Model, str]:
    """A preset's model with random bf16 weights on the GPU, and the attention it gets."""
    device = torch.device("cuda")
    model = Model.random(preset_config(preset), torch.bfloat16, device, PlainArenas(device))
    return model, available_backends(head_shape(model), windows=False, block_tokens=16)[0]


def make_ready(server: CudaServer, row_max: int) -> None:
    """Captures the graphs of all row counts of an idle server: none is captured in a record."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for slot in range(SLOT_COUNT):
            for row_count in range(row_max, 0, -1):
                server.step.capture_forward(slot, server.step.buckets.decode_shape(row_count))
                server.step.capture_sample(slot, row_count, Features.NONE)
    torch.cuda.synchronize()


def run_steps(server: CudaServer, step_count: int) -> list[StepStamps]:
    """Lets `step_count` more steps come back, or a few more; their stamps."""
    first = len(server.stamps)
    while len(server.stamps) < first + step_count:
        assert not server.core.is_idle, "the work ended early"
        server.turn()
    return server.stamps[first:]


def record(server: CudaServer, step_count: int) -> list[RecordedStep]:
    """Lets `step_count` steps, or a few more, run under the profiler.

    The server has work for all of them, and its stamps are those of all its steps.
    """
    from torch.profiler import ProfilerActivity, profile

    # Nothing runs when the profiler starts or ends, so that it sees whole steps.
    torch.cuda.synchronize()
    first = len(server.stamps) + server.device.in_flight
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        run_steps(server, first + step_count - len(server.stamps))
        end = len(server.stamps) + server.device.in_flight
        torch.cuda.synchronize()
    if end > len(server.stamps):
        run_steps(server, end - len(server.stamps))
    return divide(_kernels(profiled.events()), server.stamps[first:end])


def _kernels(events: Any) -> list[Kernel]:
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.name.startswith(OTHER_STREAMS + NO_WORK)
    ]


def machine(backend: str) -> dict[str, str]:
    """What a result was measured with."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "attention": backend,
    }
