"""The client's errors and how a gRPC status becomes one.

::

    GaplessError
    ├── RefusedError        the request is at fault, or a limit was reached
    ├── LostError           something is not there, not yet, or no longer; repeating may help
    │   └── NoServerError   nothing answers at the address
    └── BugError            the server's mistake (or an answer that breaks the protocol)

The family of an error comes from the table in ``gapless.protos.reasons``, by the reason that the
server put into the status; a status without one (made by gRPC itself, or by a newer server) is
judged by its code. Called by whoever awaits a call; must not know which call that was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from gapless.protos.reasons import ERROR_DOMAIN, TABLE, Family, Reason

BACKEND_UNHEALTHY: Final = "backend unhealthy"
"""gRPC's words for a server that is there, but whose health says that it takes no requests."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of the request that the server objects to."""

    field: str
    description: str


class GaplessError(Exception):
    """A call that failed.

    Attributes:
        code: name of the gRPC status code, such as ``"INVALID_ARGUMENT"``.
        reason: a `Reason`; a plain string if the server is newer than this client; None if the
            status carried none.
        metadata: what the reason says about itself, such as ``{"promptTokens": "9000"}``.
        violations: fields objected to; empty for most reasons.
        retry_after_s: when the server suggests to try again, in seconds; None if it does not say.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "UNKNOWN",
        reason: Reason | str | None = None,
        metadata: Mapping[str, str] | None = None,
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.metadata: Mapping[str, str] = MappingProxyType(dict(metadata or {}))
        self.violations = violations
        self.retry_after_s = retry_after_s


class RefusedError(GaplessError):
    """The server will not do this: the request is at fault, or a limit was reached."""


class LostError(GaplessError):
    """The environment failed: starting, draining, out of time, or a connection that broke."""


class NoServerError(LostError):
    """Nothing answers at the address."""


class BugError(GaplessError):
    """The server failed in a way that is its own fault."""


CLASSES: Final[Mapping[Family, type[GaplessError]]] = MappingProxyType(
    {Family.REFUSED: RefusedError, Family.LOST: LostError, Family.BUG: BugError}
)
"""Family of the table → class raised; one to one."""

_CODES_WITHOUT_REASON: Final[Mapping[str, type[GaplessError]]] = MappingProxyType(
    {
        "CANCELLED": LostError,
        "UNAVAILABLE": LostError,
        "DEADLINE_EXCEEDED": LostError,
        "ABORTED": LostError,
        "INTERNAL": BugError,
        "UNKNOWN": BugError,
        "DATA_LOSS": BugError,
    }
)
"""Statuses that no row of the table made; every other code is a refusal."""


def from_call(error: grpc.aio.AioRpcError, *, received_any: bool = False) -> GaplessError:
    """What a failed call means.

    Args:
        error: as raised by grpc.aio.
        received_any: whether the server had answered on this call before it failed; such a call
            has met a server, whatever broke it then.
    """
    code = error.code().name
    text = error.details() or ""
    info = error_details_pb2.ErrorInfo()
    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None
    status = _status(error)
    for detail in status.details if status is not None else ():
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Is(bad_request.DESCRIPTOR) and detail.Unpack(bad_request):
            violations = tuple(
                Violation(v.field, v.description) for v in bad_request.field_violations
            )
        elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    reason = _reason(info.reason) if info.domain == ERROR_DOMAIN else None
    kind = _class_of(code, reason)
    if code == "UNAVAILABLE" and reason is None and not received_any:
        if BACKEND_UNHEALTHY in text:
            text = "the server is there but takes no requests now: it is starting or draining"
        else:
            kind = NoServerError
    elif code == "UNAVAILABLE" and reason is None:
        text = f"the connection to the server broke: {text}"
    elif code == "DEADLINE_EXCEEDED" and reason is None:
        text = "the time that the call was given ran out"
    return kind(
        text or code,
        code=code,
        reason=reason,
        metadata=dict(info.metadata),
        violations=violations,
        retry_after_s=retry_after_s,
    )


def _status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    """The google.rpc.Status in the trailers; None if there is none or it contradicts the call."""
    try:
        return rpc_status.from_call(error)
    except ValueError:
        return None


def _reason(name: str) -> Reason | str | None:
    return Reason(name) if name in Reason.__members__ else name or None


def _class_of(code: str, reason: Reason | str | None) -> type[GaplessError]:
    if isinstance(reason, Reason):
        return CLASSES[TABLE[reason].family]
    return _CODES_WITHOUT_REASON.get(code, RefusedError)
