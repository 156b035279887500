"""What the loop writes down of each step, if it was asked to.

Owns the records until the end, in memory that is there from the start: the loop makes stores, no
allocation and no I/O. Knows nothing of requests. Called by `loop`; `__main__` saves it.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final

import numpy as np

from gapless.protos.slots import Frame, Result
from gapless.protos.step_log import STEP_RECORD, StepColumn

log = logging.getLogger(__name__)

STEPS_MAX: Final = 1 << 18
"""Records of one log, 28 MiB; steps beyond are not written down."""
_WIDTH: Final = len(StepColumn)


class StepLog:
    """The records of one scheduler's life. Step numbers begin at 0 and go up by one."""

    def __init__(self, path: Path, steps_max: int = STEPS_MAX) -> None:
        """Takes the memory, and makes the file to learn now whether that is possible.

        Raises:
            OSError: it is not.
        """
        path.touch()
        self._path = path
        self._steps_max = steps_max
        # Filled, not merely reserved: each page is there before the loop runs.
        self._words = np.full(steps_max * _WIDTH, 0, np.int64)
        self._cells = self._words.data
        self._next_step = 0
        self._idle_until_ns = 0

    def work_arrived(self, now: float) -> None:
        """A request came while nothing was live and no step in flight."""
        self._idle_until_ns = int(now * 1e9)

    def published(self, frame: Frame, published_ns: int) -> None:
        """The word of `frame` has been sent; its own stamp says when the build began."""
        idle_until_ns, self._idle_until_ns = self._idle_until_ns, 0
        self._next_step = frame.step + 1
        if frame.step >= self._steps_max:
            return
        cells, at = self._cells, frame.step * _WIDTH
        cells[at + StepColumn.STEP] = frame.step
        cells[at + StepColumn.EPOCH] = frame.epoch
        cells[at + StepColumn.ROW_COUNT] = frame.row_count
        cells[at + StepColumn.TOKEN_COUNT] = frame.token_count
        cells[at + StepColumn.RESULT_COUNT] = int(frame.rows.result_count.sum())
        cells[at + StepColumn.CONTEXT_TOKENS] = int(frame.rows.context_length.sum())
        cells[at + StepColumn.IDLE_UNTIL_NS] = idle_until_ns
        cells[at + StepColumn.BUILT_FROM_NS] = frame.published_ns
        cells[at + StepColumn.PUBLISHED_NS] = published_ns

    def taken(self, result: Result, received: float) -> None:
        """The core has just taken `result`, whose word was read at `received`, in seconds."""
        now_ns = time.monotonic_ns()
        if result.step >= self._steps_max:
            return
        cells, at = self._cells, result.step * _WIDTH
        cells[at + StepColumn.ACCEPTED_NS] = result.accepted_ns
        cells[at + StepColumn.STARTED_NS] = result.started_ns
        cells[at + StepColumn.FINISHED_NS] = result.finished_ns
        cells[at + StepColumn.RECEIVED_NS] = int(received * 1e9)
        cells[at + StepColumn.TAKEN_NS] = now_ns

    def save(self) -> None:
        """Writes the file: one record for each step that was published.

        Raises:
            OSError: it cannot be written.
        """
        count = min(self._next_step, self._steps_max)
        with self._path.open("wb") as file:
            np.save(file, self._words[: count * _WIDTH].view(STEP_RECORD))
        log.info("step log: %d of %d steps in %s", count, self._next_step, self._path)
