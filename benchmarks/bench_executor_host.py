"""Microseconds a step of the executor's host: ``python -m benchmarks.bench_executor_host``.

Steady decode of a CUDA device whose graphs hold nothing but the two stamps. Real are the slots, the
checks, the order of calls, the watcher thread and the hand-over to it and back. Without a GPU,
streams, events, graphs and FlashInfer's planner are stand-ins that do nothing: what is left is the
Python between a word and the driver.

With `--aligned`, all rows begin a block in the same step, as in a batch of equal prompts; otherwise
each at a moment of its own, so that each step is planned anew. `--pause-ms` lets the processor do
something else between two steps, as it does while a real one runs: caches are cold then.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import json
import mmap
import select
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch

from gapless.executor.arenas import PlainArenas
from gapless.executor.device import Device, Regions
from gapless.executor.kv import KvPool, KvShape
from gapless.executor.seats import SeatCopy
from gapless.protos.messages import Epoch, StepNumber
from gapless.protos.seats import SeatLayout
from gapless.protos.slots import (
    Features,
    Frame,
    FrameLayout,
    FrameSlots,
    ResultLayout,
    ResultSlots,
    Rows,
)

ROW_COUNTS: Final = (32, 256, 1024)
HEADS: Final = types.SimpleNamespace(heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16)
"""Those of an 8B Llama."""
FIRST_CONTEXT: Final = 257
BLOCK_TOKENS: Final = 16
WARM_STEPS: Final = 50
PARTS: Final = ("read", "check", "upload", "plan", "run")
LAND: Final = "land"
COLUMNS: Final = (*PARTS, "rest", "accept", LAND, "finished", "cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Medians in microseconds; `cpu` is the mean processor time of the whole process."""

    rows: int
    us: dict[str, float]


class _Stream:
    """A stream or an event on which nothing ever waits."""

    def __init__(self, **_: bool) -> None: ...
    def record(self, _: _Stream) -> None: ...
    def wait_event(self, _: _Stream) -> None: ...
    def wait_stream(self, _: _Stream) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def replay(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class _Wrapper:
    """FlashInfer's, as far as the executor touches it."""

    def __init__(self, workspace: torch.Tensor, *_: object, **__: object) -> None:
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = workspace
        self._pin_memory_int_workspace_buffer = workspace
        self._cached_module = types.SimpleNamespace(plan=lambda *_: ())

    def plan(self, *_: object, **__: object) -> None: ...


class _Triton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Triton with all it has; launching a kernel does nothing."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        is_triton = name.partition(".")[0] == "triton"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_triton else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = mock.MagicMock(name=spec.name)
        module.cdiv = lambda count, size: -(-count // size)
        module.next_power_of_2 = lambda count: 1 << (count - 1).bit_length()
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def _do_without_gpu() -> None:
    """Puts stand-ins in the place of what this machine lacks, for the rest of the process."""
    cudart = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    cuda: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda stream: stream,
        "set_stream": _nothing,
        "synchronize": _nothing,
        "cudart": lambda: cudart,
        "memory_snapshot": list,
        "graph_pool_handle": lambda: (0, 0),
        "max_memory_reserved": lambda: 0,
        "get_device_properties": lambda _: types.SimpleNamespace(multi_processor_count=132),
    }
    mock.patch.multiple(torch.cuda, **cuda).start()
    sys.meta_path.insert(0, _Triton())  # before a real one, which has no device here
    flashinfer: Any = types.ModuleType("flashinfer")
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = _Wrapper
    sys.modules["flashinfer"] = flashinfer
    from gapless.executor import cuda_step

    mock.patch.object(cuda_step, "_captured", return_value=_Stream()).start()


class Bench:
    """A CUDA device with empty graphs in steady decode, one step in flight at a time."""

    def __init__(self, row_count: int, *, aligned: bool) -> None:
        from gapless.executor import cuda_device, cuda_step, kernels
        from gapless.executor.attention_backends import FLASHINFER
        from gapless.executor.cuda_attention import HeadShape

        place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        layout = FrameLayout(row_count, max(row_count, 512), 64 * row_count)
        results = ResultLayout(row_count)
        seats = SeatLayout(row_count + 1, 64)
        self.frames = FrameSlots(layout, memoryview(mmap.mmap(-1, layout.size_bytes)))
        shape = KvShape(1, HEADS.kv_heads, HEADS.dim, BLOCK_TOKENS, HEADS.dtype)
        model: Any = types.SimpleNamespace(
            shape=types.SimpleNamespace(vocab_size=8, dtype=HEADS.dtype)
        )
        pool, copy = KvPool(PlainArenas(place), shape, 2), SeatCopy(seats, place)
        heads = HeadShape(HEADS.heads, HEADS.kv_heads, HEADS.dim, HEADS.dtype)

        class Step(cuda_step.CudaStep):
            """Stamps, and nothing between."""

            def _forward(self, slot: int, *_: object) -> None:
                kernels.stamp(self.slots[slot].stamps, 0)

            def _sample(self, slot: int, *_: object) -> None:
                kernels.stamp(self.slots[slot].stamps, 1)

        step = Step(model, None, pool, copy, heads, layout, FLASHINFER)
        regions = Regions(
            self.frames,
            ResultSlots(results, memoryview(mmap.mmap(-1, results.size_bytes))),
            seats.table(bytearray(seats.size_bytes)),
        )
        self.device: Device = cuda_device.CudaDevice(Epoch(1), regions, step)
        self.times_ns: dict[str, list[int]] = {part: [] for part in (*PARTS, LAND)}
        self._time(self.frames, "read", "read")
        self._time(Frame, "check", "check")
        self._time(cuda_device._Upload, "enqueue", "upload")
        self._time(step, "plan", "plan")
        self._time(step, "run", "run")
        self._time(self.device, "_land", LAND)
        self._step = 0
        self._row_count = row_count
        self._aligned = aligned

    def _time(self, owner: Any, name: str, part: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)
        times = self.times_ns[part]

        @functools.wraps(plain)
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter_ns()
            found = plain(*arguments)
            times.append(time.perf_counter_ns() - began)
            return found

        setattr(owner, name, timed)

    def step_ns(self, pause_s: float) -> tuple[int, int]:
        """One step; how long `accept` and `finished` took."""
        step, self._step = StepNumber(self._step), self._step + 1
        self.frames.write(_frame(step, self._row_count, aligned=self._aligned))
        if pause_s:
            time.sleep(pause_s)
        began = time.perf_counter_ns()
        self.device.accept(step)
        accepted = time.perf_counter_ns()
        assert self.device.may_sleep()
        select.select([self.device.wakeup], [], [])
        woken = time.perf_counter_ns()
        assert self.device.finished() == (step,), step
        return accepted - began, time.perf_counter_ns() - woken


def _nothing(*_: object) -> None: ...


def _frame(step: int, row_count: int, *, aligned: bool) -> Frame:
    """Each row continues its own of the step before."""
    places = np.arange(row_count, dtype=np.int32)
    ones = np.ones(row_count, np.int32)
    begin = np.zeros_like(places) if aligned else places % BLOCK_TOKENS
    context = begin + np.int32(FIRST_CONTEXT + step)
    return Frame(
        epoch=Epoch(1),
        step=StepNumber(step),
        rows=Rows(places + 1, places if step else -ones, places, ones, context, ones),
        token_ids=places,
        positions=context - 1,
        assignments=np.empty((0, 3), np.int32),
        features=Features.NONE,
        published_ns=0,
    )


def measure(row_count: int, step_count: int, *, aligned: bool, pause_s: float) -> Line:
    """Medians over `step_count` steps."""
    with mock.patch.object(Frame, "check", Frame.check):
        bench = Bench(row_count, aligned=aligned)
        for _ in range(WARM_STEPS):
            bench.step_ns(0.0)
        for times in bench.times_ns.values():
            times.clear()
        cpu_ns = time.process_time_ns()
        accept, finished = zip(*(bench.step_ns(pause_s) for _ in range(step_count)), strict=True)
        cpu_ns = time.process_time_ns() - cpu_ns
        bench.device.close()
    us = {name: float(np.median(times)) / 1e3 for name, times in bench.times_ns.items()}
    us["accept"], us["finished"] = float(np.median(accept)) / 1e3, float(np.median(finished)) / 1e3
    us["rest"] = us["accept"] - sum(us[part] for part in PARTS)
    us["cpu"] = cpu_ns / step_count / 1e3
    return Line(row_count, {name: round(us[name], 1) for name in COLUMNS})


def main(arguments: list[str]) -> int:
    """Prints a line a number of rows."""
    parser = argparse.ArgumentParser(prog="bench_executor_host", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps a line (2000)")
    parser.add_argument("--json", type=Path, help="write the lines to this file as well")
    parser.add_argument("--aligned", action="store_true", help="all rows begin a block at once")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="sleep before a step (0)")
    options = parser.parse_args(arguments)
    print(f"{'rows':>6}" + "".join(f"{name:>10}" for name in COLUMNS) + "   µs")
    lines = []
    if not torch.cuda.is_available():
        _do_without_gpu()
    for row_count in ROW_COUNTS:
        pause_s = options.pause_ms / 1e3
        line = measure(row_count, options.steps, aligned=options.aligned, pause_s=pause_s)
        lines.append(line)
        print(f"{row_count:>6}" + "".join(f"{line.us[name]:>10.1f}" for name in COLUMNS))
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(line) for line in lines], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
