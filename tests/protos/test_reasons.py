"""The table of failures is complete and speaks gRPC."""

from __future__ import annotations

import grpc
import pytest

from gapless.protos.reasons import TABLE, Family, Reason


def test_every_reason_has_a_row() -> None:
    assert set(TABLE) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_is_its_own_name(reason: Reason) -> None:
    assert reason.value == reason.name == reason.value.upper()


@pytest.mark.parametrize("reason", Reason)
def test_a_code_is_a_grpc_status_that_a_server_may_raise(reason: Reason) -> None:
    code = grpc.StatusCode[TABLE[reason].code]
    assert code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)


@pytest.mark.parametrize("reason", Reason)
def test_only_unavailable_is_retried(reason: Reason) -> None:
    row = TABLE[reason]
    if row.retry:
        assert row.code == "UNAVAILABLE"
        assert row.family is Family.LOST


@pytest.mark.parametrize("reason", Reason)
def test_internal_means_a_bug_and_only_that(reason: Reason) -> None:
    row = TABLE[reason]
    assert (row.family is Family.BUG) == (row.code == "INTERNAL")
