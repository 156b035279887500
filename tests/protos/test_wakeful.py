"""When an end of the border stays awake, and until when."""

from __future__ import annotations

import pytest

from gapless.protos.wakeful import CORES_MIN, SHORT_STEP_NS, Wakeful


@pytest.mark.parametrize(
    ("core_count", "step_ns", "until_ns"),
    [
        (CORES_MIN, 0, 7 + SHORT_STEP_NS),
        (CORES_MIN, SHORT_STEP_NS - 1, 7 + SHORT_STEP_NS),
        (CORES_MIN, SHORT_STEP_NS, 0),
        (CORES_MIN - 1, 0, 0),
        (0, 0, 0),
    ],
)
def test_only_short_steps_on_many_cores_keep_awake(
    core_count: int, step_ns: int, until_ns: int
) -> None:
    wakeful = Wakeful(core_count)
    assert wakeful.until_ns == 0, "before the first result nobody knows"
    wakeful.step_ended(step_ns, 7)
    assert wakeful.until_ns == until_ns


def test_a_long_step_sends_to_sleep() -> None:
    wakeful = Wakeful(CORES_MIN)
    wakeful.step_ended(0, 7)
    wakeful.step_ended(SHORT_STEP_NS, 8)
    assert wakeful.until_ns == 0
