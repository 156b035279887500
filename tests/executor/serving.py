"""A server in one thread: the real scheduler core, real slots and a step runner, without processes.

The loop keeps as many steps in flight as the core allows: at depth 2, frame N+1 is built, written
and staged before step N runs, so that its rows must take their tokens by carry-over.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gapless.executor.step import StagedFrame, StepRunner
from gapless.protos.messages import (
    Epoch,
    Failed,
    Finished,
    Handle,
    Stopping,
    Submit,
)
from gapless.protos.sampling import Sampling
from gapless.protos.slots import NO_CARRY, Frame, FrameSlots, Result, ResultSlots
from gapless.scheduler.config import CoreConfig, GatewayIndex
from gapless.scheduler.core import Core

EPOCH = Epoch(1)
GATEWAY = GatewayIndex(0)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """What came out, and what happened on the way."""

    tokens: list[list[int]]
    preemption_count: int
    carried_count: int
    """Rows that took their token from the step before, on the device."""
    row_max: int
    """Most rows in a step."""
    query_length_max: int


class InProcessServer:
    """Serves requests to their end; one use."""

    def __init__(self, runner: StepRunner, config: CoreConfig) -> None:
        self.runner = runner
        self.core = Core(config, EPOCH)
        self.frames = FrameSlots(config.frame_layout, bytearray(config.frame_layout.size_bytes))
        self.results = ResultSlots(config.result_layout, bytearray(config.result_layout.size_bytes))
        self.now = 0.0
        self.waiting: deque[tuple[Frame, StagedFrame]] = deque()
        self.previous_tokens = runner.no_tokens()
        self.tokens: dict[int, list[int]] = {}
        self.carried_count = 0
        self.row_max = 0
        self.query_length_max = 0

    def serve(self, requests: Sequence[Request], *, rewind_at: Sequence[int] = ()) -> Served:
        """Runs all `requests`; preempts each of them when it has one of `rewind_at` tokens."""
        for handle, request in enumerate(requests):
            self.tokens[handle] = []
            self.core.submit(self.now, GATEWAY, _submit(handle, request))
        while not self.core.is_idle:
            while self.core.can_build() and (frame := self.core.build(self.now)) is not None:
                self._stage(frame)
            self._run()
            self.core.check()
            for handle in self._take_updates():
                if len(self.tokens[handle]) in rewind_at:
                    self.core.rewind(self.now, GATEWAY, Handle(handle))
            self.now += 0.01
        return Served(
            tokens=[self.tokens[handle] for handle in range(len(requests))],
            preemption_count=self.core.stats(self.now).preemptions_total,
            carried_count=self.carried_count,
            row_max=self.row_max,
            query_length_max=self.query_length_max,
        )

    def _stage(self, frame: Frame) -> None:
        self.frames.write(frame)
        read = self.frames.read(EPOCH, frame.step)
        read.check()
        # The copy: the staged frame and the assignments outlive the slot's views.
        kept = dataclasses.replace(read, assignments=read.assignments.copy())
        self.waiting.append((kept, self.runner.stage(read)))
        self.carried_count += int((read.rows.carry_row != NO_CARRY).sum())
        self.row_max = max(self.row_max, read.row_count)
        self.query_length_max = max(self.query_length_max, read.query_length_max)

    def _run(self) -> None:
        frame, staged = self.waiting.popleft()
        self._check_assignments(frame)
        self.runner.apply_assignments(frame.assignments)
        tokens, faults = self.runner.run(staged, self.previous_tokens)
        self.previous_tokens = _behind_poison(tokens, self.runner.row_max)
        self.results.write(
            Result(EPOCH, frame.step, tokens.numpy(), faults.numpy(), 0, 0, 10_000_000)
        )
        self.core.result(self.now, self.results.read(EPOCH, frame.step))

    def _check_assignments(self, frame: Frame) -> None:
        """A scatter has no order: two values for one word would be a race on the device."""
        given = {tuple(row) for row in frame.assignments.tolist()}
        words = {(seat, word) for seat, word, _ in given}
        assert len(given) == len(words), f"step {frame.step} assigns a word twice"

    def _take_updates(self) -> list[int]:
        """Keeps what came out; the handles that got a token."""
        got: list[int] = []
        for update in self.core.take_updates().values():
            handles = np.frombuffer(update.handles, dtype=np.int64).tolist()
            tokens = np.frombuffer(update.tokens, dtype=np.int32).tolist()
            for handle, token in zip(handles, tokens, strict=True):
                self.tokens[handle].append(token)
            got += handles
            for event in update.events:
                assert not isinstance(event, Failed), event
                if isinstance(event, Finished):
                    assert event.completion_tokens == len(self.tokens[event.handle]), event
        return got


def core_config(
    runner: StepRunner, *, depth: int, chunk_tokens_max: int, running_max: int
) -> CoreConfig:
    """Limits for a runner whose every step has room for all."""
    shape, pool = runner.model.shape, runner.pool
    layout = runner.seats.layout
    config = CoreConfig(
        running_max=running_max,
        queued_max=1000,
        depth=depth,
        step_tokens_max=256,
        chunk_tokens_max=chunk_tokens_max,
        row_max=runner.row_max,
        block_tokens=pool.block_tokens,
        block_count=pool.block_count,
        context_length=shape.context_length,
        vocab_size=shape.vocab_size,
        assignment_max=20_000,
    )
    assert config.seat_layout.words == layout.words, (config.seat_layout, layout)
    return config


def _submit(handle: int, request: Request) -> Submit:
    return Submit(
        handle=Handle(handle),
        request_id=f"request-{handle}",
        tenant="",
        prompt=np.array(request.prompt, dtype=np.int32).tobytes(),
        sampling=request.sampling,
        stopping=Stopping(max_new_tokens=request.max_new_tokens),
        received_s=0.0,
    )


def _behind_poison(tokens: Tensor, row_max: int) -> Tensor:
    """The output buffer of a step: rows beyond the step's hold nothing that may be carried over."""
    buffer = torch.full((row_max,), -1, dtype=torch.int32)
    buffer[: len(tokens)] = tokens
    return buffer
