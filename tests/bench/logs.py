"""Step logs made up for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gapless.protos.step_log import STEP_RECORD, Steps

FIRST_NS = 5_000_000


def step_log(moments: Sequence[Sequence[int]], *, rows: int = 2) -> Steps:
    """Steps that only decode.

    Args:
        moments: a step each: idle_until (0: never idle), built_from, published, accepted, started,
            finished, received, taken.
        rows: of each step.
    """
    steps = np.zeros(len(moments), STEP_RECORD)
    names = STEP_RECORD.names
    assert names is not None
    for name, values in zip(names[6:], zip(*moments, strict=True), strict=True):
        steps[name] = values
    steps["step"] = np.arange(len(moments))
    steps["epoch"] = 1
    for name in ("row_count", "token_count", "result_count"):
        steps[name] = rows
    steps["context_tokens"] = 100 * rows
    return steps
