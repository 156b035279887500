"""The one way to refuse or fail a call: reason → gRPC status with google.rpc details.

Owns the form of an error as a client sees it. Code and family of a reason stand in
`gapless.protos.reasons`; nothing here knows why something fails. Everything in the gateway raises
`Failure`; `boundary.Boundary` turns it into the status of the call.

What a client wrote may come back to it here (a label's key, a model's name), so every text is cut
to a size: all details together stay well below the 8 KiB of metadata that clients accept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from gapless.protos.messages import Failed
from gapless.protos.reasons import ERROR_DOMAIN, TABLE, Reason

VIOLATIONS_MAX: Final = 10
"""Most violations reported at once."""
MESSAGE_BYTES_MAX: Final = 512
FIELD_BYTES_MAX: Final = 128
DESCRIPTION_BYTES_MAX: Final = 160
METADATA_ENTRIES_MAX: Final = 4

PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
DETAILS_KEY: Final = "grpc-status-details-bin"

RETRY_AFTER_S: Final[Mapping[Reason, float]] = {
    Reason.QUEUE_FULL: 1.0,
    Reason.STARTING: 1.0,
    Reason.DRAINING: 0.5,
    Reason.NO_EXECUTOR: 1.0,
}
"""Reasons that advise a retry, and after how long if nobody knows better."""


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that breaks a rule."""

    field: str
    """Path from the request's root, such as ``sampling.top_p``."""
    description: str


@dataclasses.dataclass(frozen=True, slots=True)
class Resource:
    """What was not found, or is there already."""

    type: str
    name: str


class Failure(Exception):  # noqa: N818 - named by what happened
    """A call that ends with an error status, and all that its client is told.

    `metadata` becomes `ErrorInfo.metadata`; its keys are in lowerCamelCase.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        violations: tuple[Violation, ...] = (),
        resource: Resource | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.violations = violations
        self.resource = resource
        self.retry_after_s = RETRY_AFTER_S.get(reason) if retry_after_s is None else retry_after_s

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code of the reason."""
        return status_code(self.reason)


def status_code(reason: Reason) -> grpc.StatusCode:
    """The gRPC status code of `reason`."""
    return getattr(grpc.StatusCode, TABLE[reason].code)


def invalid(violations: tuple[Violation, ...], reason: Reason = Reason.INVALID_FIELD) -> Failure:
    """INVALID_ARGUMENT with a BadRequest detail; the message repeats the first violation."""
    assert violations, "an invalid request has at least one violation"
    first = violations[0]
    message = f"{first.field}: {first.description}"
    if len(violations) > 1:
        message += f" (and {len(violations) - 1} more)"
    return Failure(reason, message, violations=violations[:VIOLATIONS_MAX])


def from_scheduler(failed: Failed, request_id: str) -> Failure:
    """A refusal or failure that the scheduler reported for a request."""
    resource = None
    if failed.reason is Reason.REQUEST_ID_IN_USE:
        resource = Resource("request", request_id)
    return Failure(
        failed.reason,
        failed.message,
        metadata=failed.metadata,
        resource=resource,
        retry_after_s=failed.retry_after_s,
    )


def engine_error(request_id: str) -> Failure:
    """A bug of ours: the client learns only the id under which the logs tell more."""
    metadata = {"requestId": request_id} if request_id else {}
    return Failure(Reason.ENGINE_ERROR, "internal error; see the server's log", metadata=metadata)


def rich_status(failure: Failure) -> status_pb2.Status:
    """The google.rpc.Status of `failure`, every text cut to its limit."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=failure.reason.value,
            domain=ERROR_DOMAIN,
            metadata={
                _cut(key, FIELD_BYTES_MAX): _cut(value, FIELD_BYTES_MAX)
                for key, value in list(failure.metadata.items())[:METADATA_ENTRIES_MAX]
            },
        )
    ]
    if failure.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in failure.violations[:VIOLATIONS_MAX]:
            bad_request.field_violations.add(
                field=_cut(violation.field, FIELD_BYTES_MAX),
                description=_cut(violation.description, DESCRIPTION_BYTES_MAX),
            )
        details.append(bad_request)
    if failure.resource is not None:
        details.append(
            error_details_pb2.ResourceInfo(
                resource_type=failure.resource.type,
                resource_name=_cut(failure.resource.name, FIELD_BYTES_MAX),
            )
        )
    if failure.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(_retry_after_ms(failure.retry_after_s))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(
        code=failure.code.value[0], message=_cut(failure.message, MESSAGE_BYTES_MAX)
    )
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(context: grpc.aio.ServicerContext, failure: Failure) -> None:
    """Ends the call with `failure`'s status. Always raises grpc's AbortError, which must pass."""
    status = rich_status(failure)
    trailing: tuple[tuple[str, str | bytes], ...] = ((DETAILS_KEY, status.SerializeToString()),)
    if failure.retry_after_s is not None:
        trailing += ((PUSHBACK_KEY, str(_retry_after_ms(failure.retry_after_s))),)
    await context.abort(failure.code, status.message, trailing)


def _retry_after_ms(retry_after_s: float) -> int:
    return max(1, round(retry_after_s * 1000))


def _cut(text: str, bytes_max: int) -> str:
    """`text`, or its beginning, in at most `bytes_max` bytes of UTF-8, on one line."""
    text = text[:bytes_max].replace("\r", " ").replace("\n", " ")
    data = text.encode("utf-8", errors="replace")
    if len(data) <= bytes_max:
        return data.decode()
    return data[: bytes_max - 3].decode(errors="ignore") + "…"
