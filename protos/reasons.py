"""The one table of failures: reason → family, gRPC status code, retry advice.

The gateway raises by it, the scheduler names reasons from it, the client maps back by it.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

ERROR_DOMAIN = "gapless.v1"
"""`ErrorInfo.domain` of every failure."""


class Family(enum.Enum):
    """Whose fault it is."""

    REFUSED = "refused"
    """The caller's fault, or a limit."""
    LOST = "lost"
    """The environment: something is not there, not yet, or no longer."""
    BUG = "bug"
    """Ours."""


class Reason(enum.StrEnum):
    """`ErrorInfo.reason` of a failure."""

    INVALID_FIELD = "INVALID_FIELD"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    KV_CAPACITY_EXCEEDED = "KV_CAPACITY_EXCEEDED"
    TEMPLATE_ERROR = "TEMPLATE_ERROR"
    UNSUPPORTED_FEATURE = "UNSUPPORTED_FEATURE"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    ADAPTER_NOT_FOUND = "ADAPTER_NOT_FOUND"
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    QUEUE_FULL = "QUEUE_FULL"
    SLOW_CONSUMER = "SLOW_CONSUMER"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    STARTING = "STARTING"
    DRAINING = "DRAINING"
    NO_EXECUTOR = "NO_EXECUTOR"
    EXECUTOR_LOST = "EXECUTOR_LOST"
    SCHEDULER_LOST = "SCHEDULER_LOST"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    DEADLINE = "DEADLINE"
    ENGINE_ERROR = "ENGINE_ERROR"


class Row(NamedTuple):
    """One row of the table."""

    family: Family
    code: str
    """Name of the gRPC status code."""
    retry: bool
    """Whether the published service config retries it when nothing was received yet."""


TABLE: dict[Reason, Row] = {
    Reason.INVALID_FIELD: Row(Family.REFUSED, "INVALID_ARGUMENT", False),
    Reason.CONTEXT_LENGTH_EXCEEDED: Row(Family.REFUSED, "INVALID_ARGUMENT", False),
    Reason.KV_CAPACITY_EXCEEDED: Row(Family.REFUSED, "INVALID_ARGUMENT", False),
    Reason.TEMPLATE_ERROR: Row(Family.REFUSED, "INVALID_ARGUMENT", False),
    Reason.UNSUPPORTED_FEATURE: Row(Family.REFUSED, "UNIMPLEMENTED", False),
    Reason.MODEL_NOT_FOUND: Row(Family.REFUSED, "NOT_FOUND", False),
    Reason.ADAPTER_NOT_FOUND: Row(Family.REFUSED, "NOT_FOUND", False),
    Reason.REQUEST_ID_IN_USE: Row(Family.REFUSED, "ALREADY_EXISTS", False),
    Reason.QUEUE_FULL: Row(Family.REFUSED, "RESOURCE_EXHAUSTED", False),
    Reason.SLOW_CONSUMER: Row(Family.REFUSED, "RESOURCE_EXHAUSTED", False),
    Reason.PERMISSION_DENIED: Row(Family.REFUSED, "PERMISSION_DENIED", False),
    Reason.STARTING: Row(Family.LOST, "UNAVAILABLE", True),
    Reason.DRAINING: Row(Family.LOST, "UNAVAILABLE", True),
    Reason.NO_EXECUTOR: Row(Family.LOST, "UNAVAILABLE", True),
    Reason.EXECUTOR_LOST: Row(Family.LOST, "UNAVAILABLE", False),
    Reason.SCHEDULER_LOST: Row(Family.LOST, "UNAVAILABLE", False),
    Reason.QUEUE_TIMEOUT: Row(Family.LOST, "DEADLINE_EXCEEDED", False),
    Reason.DEADLINE: Row(Family.LOST, "DEADLINE_EXCEEDED", False),
    Reason.ENGINE_ERROR: Row(Family.BUG, "INTERNAL", False),
}
