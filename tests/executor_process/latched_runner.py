"""A runner that stops where a test wants it to.

It stands in for the model alone: threads, slots, queue and wake-up around it are the real ones.
"""

from __future__ import annotations

import dataclasses
import threading

import torch
from torch import Tensor

from gapless.protos.seats import Int32s
from gapless.protos.slots import Frame
from tests.executor_process.frames import ATTACH

LIMIT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Staged:
    """What the latched runner keeps of a frame."""

    step: int
    token_ids: tuple[int, ...]
    carry_row: int


class LatchedRunner:
    """Adds one to a row's first input token (literal or carried); each step waits for `go`."""

    def __init__(self) -> None:
        self.staged: list[int] = []
        self.assigned: list[list[int]] = []
        self.accepted = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.fail_at: int | None = None

    def no_tokens(self) -> Tensor:
        return torch.zeros(ATTACH.row_max, dtype=torch.int32)

    def stage(self, frame: Frame) -> Staged:
        self.staged.append(frame.step)
        self.accepted.release()
        return Staged(frame.step, tuple(frame.token_ids.tolist()), int(frame.rows.carry_row[0]))

    def apply_assignments(self, assignments: Int32s) -> None:
        self.assigned.append(assignments.ravel().tolist())

    def run(self, staged: Staged, previous_tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.begun.release()
        assert self.go.acquire(timeout=LIMIT_S)
        if staged.step == self.fail_at:
            raise RuntimeError("out of luck")
        carried = staged.carry_row >= 0
        source = int(previous_tokens[staged.carry_row]) if carried else staged.token_ids[0]
        return torch.tensor([source + 1]), torch.zeros(1, dtype=torch.int32)
