"""The step log: what a scheduler wrote down of each step, for those who measure it.

A ``.npy`` file (``numpy.load``, no pickle) of one record a step, in the order of their numbers,
with the fields of `StepColumn` in lower case, int64 each. All times are CLOCK_MONOTONIC in
nanoseconds; 0 says that it has not happened: the last records may be of steps without a result::

    built_from ─ published ─ accepted ─ started ─ finished ─ received ─ taken
    ╰──── scheduler ─────╯   executor   ╰── device ───╯      ╰─ scheduler ──╯

Written by the scheduler at its end (``--step-log``), read by `gapless.bench`.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt


class StepColumn(enum.IntEnum):
    """The fields of a record, in order."""

    STEP = 0
    EPOCH = 1
    ROW_COUNT = 2
    TOKEN_COUNT = 3
    """Input tokens; as many as rows in a step that only decodes."""
    RESULT_COUNT = 4
    """Rows that get a token."""
    CONTEXT_TOKENS = 5
    """Sum of the rows' context lengths: positions whose KV the step reads."""
    IDLE_UNTIL_NS = 6
    """When work arrived, if nothing was live and no step in flight before this one; else 0."""
    BUILT_FROM_NS = 7
    """The scheduler began to build the frame."""
    PUBLISHED_NS = 8
    """It stood in its slot; its word left next."""
    ACCEPTED_NS = 9
    """The executor's stamps; see `slots.ResultHeader`."""
    STARTED_NS = 10
    FINISHED_NS = 11
    RECEIVED_NS = 12
    """The scheduler had read the word that the step is done."""
    TAKEN_NS = 13
    """Its tokens stood in the sequences' logs."""


STEP_RECORD: Final = np.dtype([(column.name.lower(), np.int64) for column in StepColumn])
"""The type of a record."""

Steps = npt.NDArray[np.void]
"""Records, ``[step_count]`` of STEP_RECORD."""


def read_step_log(path: Path) -> Steps:
    """The records of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no step log.
    """
    steps: Steps = np.load(path, allow_pickle=False)
    if steps.dtype != STEP_RECORD or steps.ndim != 1:
        raise ValueError(f"{path} is no step log: {steps.dtype}, {steps.shape}")
    return steps
