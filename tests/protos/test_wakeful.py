"""When an end of the border stays awake, and until when."""

from __future__ import annotations

import pytest

from gapless.protos.wakeful import CORES_MIN, SHORT_STEP_NS, Wakeful


@pytest.mark.parametrize(
    ("core_count", "step_ns", "is_awake"),
    [
        (CORES_MIN, 0, True),
        (CORES_MIN, SHORT_STEP_NS - 1, True),
        (CORES_MIN, SHORT_STEP_NS, False),
        (CORES_MIN - 1, 0, False),
        (0, 0, False),
    ],
)
def test_only_short_steps_on_many_cores_keep_awake(
    core_count: int, step_ns: int, is_awake: bool
) -> None:
    wakeful = Wakeful(core_count)
    assert not wakeful.stays_awake(7), "before the first result nobody knows"
    wakeful.step_ended(step_ns, 7)
    assert wakeful.stays_awake(7) == is_awake
    assert wakeful.stays_awake(7 + SHORT_STEP_NS - 1) == is_awake
    assert not wakeful.stays_awake(7 + SHORT_STEP_NS)


def test_a_long_step_sends_to_sleep() -> None:
    wakeful = Wakeful(CORES_MIN)
    wakeful.step_ended(0, 7)
    wakeful.step_ended(SHORT_STEP_NS, 8)
    assert not wakeful.stays_awake(8)
