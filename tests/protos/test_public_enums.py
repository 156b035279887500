"""Private enums that mirror public ones: same names, same numbers, nothing missing."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import pytest

from gapless.protos import admin_pb2, inference_pb2
from gapless.protos.messages import FinishReason, ServerState


@pytest.mark.parametrize(
    ("private", "public", "prefix"),
    [
        (FinishReason, inference_pb2.FinishReason.items(), "FINISH_REASON_"),
        (ServerState, admin_pb2.ServerState.items(), "SERVER_STATE_"),
    ],
)
def test_numbers_are_those_of_the_public_enum(
    private: type[enum.IntEnum], public: Sequence[tuple[str, int]], prefix: str
) -> None:
    expected = {name.removeprefix(prefix): number for name, number in public if number != 0}
    assert {member.name: member.value for member in private} == expected
