"""Microseconds a step of the scheduler: ``python -m benchmarks.bench_scheduler [--json FILE]``.

Steady decode at depth 2, all that the scheduler does for a step but the sockets: read the result
slot, take the result, plan the next step, bring the seat table up to date, write the step slot,
collect the updates. Once with an empty queue and once behind a full one: the cost must not depend
on who waits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np

from gapless.protos.messages import Epoch, Handle, Stopping, Submit
from gapless.protos.sampling import Sampling
from gapless.protos.seats import Int32s
from gapless.protos.slots import Frame, FrameSlots, Result, ResultSlots
from gapless.scheduler.config import SAMPLING_WORDS_MAX, CoreConfig, GatewayIndex
from gapless.scheduler.core import Core
from gapless.scheduler.frames import apply_assignments

ROW_COUNTS = (32, 256, 1024)
WAITING_COUNTS = (0, 50_000)
GOALS_US = {32: 150, 256: 500, 1024: 1500}
"""Median, with anybody waiting or nobody."""
VOCAB_SIZE = 128_256
BLOCK_TOKENS = 16
PROMPT_TOKENS = 16
STOP_TOKENS = (128_001, 128_008, 128_009)
"""Ids the fake results never hold."""
GATEWAY = GatewayIndex(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One measurement."""

    rows: int
    waiting: int
    median_us: float
    p99_us: float
    goal_us: int


class Bench:
    """A core in steady decode, with an executor that always answers at once."""

    def __init__(self, row_count: int, waiting_count: int, step_count: int) -> None:
        tokens_max = PROMPT_TOKENS + step_count + 64
        blocks = -(-tokens_max // BLOCK_TOKENS)
        self.config = CoreConfig(
            running_max=row_count,
            queued_max=max(row_count, waiting_count + 1),
            depth=2,
            step_tokens_max=row_count * PROMPT_TOKENS,
            chunk_tokens_max=PROMPT_TOKENS,
            row_max=row_count,
            block_tokens=BLOCK_TOKENS,
            block_count=row_count * (blocks + 2) + 1,
            context_length=tokens_max,
            vocab_size=VOCAB_SIZE,
            assignment_max=row_count * 32 + SAMPLING_WORDS_MAX + blocks,
        )
        config = self.config
        self.core = Core(config, Epoch(1))
        self.frames = FrameSlots(config.frame_layout, bytearray(config.frame_layout.size_bytes))
        self.results = ResultSlots(config.result_layout, bytearray(config.result_layout.size_bytes))
        self.table: Int32s = config.seat_layout.table(bytearray(config.seat_layout.size_bytes))
        self.tokens = np.arange(1, row_count + 1, dtype=np.int32)
        self.faults = np.zeros(row_count, np.int32)
        self._submit(0, row_count)
        first = self._build()
        self._submit(row_count, waiting_count)
        self.core.take_updates()
        self._answer(first)
        self.frame = self._build()

    def _submit(self, first: int, count: int) -> None:
        prompt = np.arange(PROMPT_TOKENS, dtype=np.int32).tobytes()
        stopping = Stopping(self.config.context_length - PROMPT_TOKENS, stop_tokens=STOP_TOKENS)
        for number in range(first, first + count):
            word = Submit(Handle(number), str(number), "", prompt, Sampling(), stopping, 0.0)
            self.core.submit(0.0, GATEWAY, word)

    def _build(self) -> Frame:
        frame = self.core.build(0.0)
        assert frame is not None, "a row can run"
        apply_assignments(self.table, frame.assignments)
        self.frames.write(frame)
        return frame

    def _answer(self, frame: Frame) -> None:
        """The executor's part."""
        count = frame.row_count
        tokens, faults = self.tokens[:count], self.faults[:count]
        self.results.write(Result(frame.epoch, frame.step, tokens, faults, 0, 0, 1))
        self._answered = frame

    def step_ns(self) -> int:
        """One step: the result of N arrives while N+1 runs, and N+2 is built."""
        running = self.frame
        began = time.perf_counter_ns()
        self.core.result(0.0, self.results.read(self._answered.epoch, self._answered.step))
        self.frame = self._build()
        self.core.take_updates()
        took = time.perf_counter_ns() - began
        self._answer(running)
        return took


def measure(row_count: int, waiting_count: int, step_count: int) -> Line:
    """Median and 99th percentile over `step_count` steps, in microseconds."""
    bench = Bench(row_count, waiting_count, step_count)
    times_us = np.array([bench.step_ns() for _ in range(step_count)]) / 1000
    assert bench.frame.row_count == row_count, "it is not steady decode"
    bench.core.check()
    median, p99 = np.percentile(times_us, [50, 99])
    return Line(row_count, waiting_count, float(median), float(p99), GOALS_US[row_count])


def main(arguments: list[str]) -> int:
    """Prints a line a measurement; 1 if a goal is missed and `--strict` is given."""
    parser = argparse.ArgumentParser(prog="bench_scheduler", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps a line (2000)")
    parser.add_argument("--json", type=Path, help="write the lines to this file as well")
    parser.add_argument("--strict", action="store_true", help="fail if a median misses its goal")
    options = parser.parse_args(arguments)
    print(f"{'rows':>6} {'waiting':>8} {'median µs':>10} {'p99 µs':>8} {'goal µs':>8}")
    lines = []
    for row_count in ROW_COUNTS:
        for waiting_count in WAITING_COUNTS:
            line = measure(row_count, waiting_count, options.steps)
            lines.append(line)
            print(
                f"{line.rows:>6} {line.waiting:>8} {line.median_us:>10.1f} {line.p99_us:>8.1f} "
                f"{line.goal_us:>8}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(line) for line in lines], indent=2))
    missed = any(line.median_us > line.goal_us for line in lines)
    return 1 if missed and options.strict else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
