"""What validation found wrong with one request, collected in one pass and reported together.

The first finding in the order of the rules decides the status. If that is INVALID_ARGUMENT, every
other field that breaks a rule is reported beside it. A field that is well-formed but not honoured
here (UNIMPLEMENTED) counts only when nothing else was found: a NaN is invalid before it is
unsupported.
"""

from __future__ import annotations

import math

from google.protobuf import duration_pb2

from gapless.gateway import failures
from gapless.gateway.failures import Failure, Violation
from gapless.protos.reasons import Reason

_DURATION_SECONDS_MAX = 315_576_000_000
_NANOS_MAX = 999_999_999


class Findings:
    """Collects; `raise_first` raises what the pass comes to."""

    def __init__(self) -> None:
        self._violations: list[Violation] = []
        self._violation_reason: Reason | None = None
        self._refusal: Failure | None = None
        self._unsupported: list[str] = []

    def invalid(self, field: str, description: str, reason: Reason = Reason.INVALID_FIELD) -> None:
        """A field breaks a rule."""
        if self._violation_reason is None:
            self._violation_reason = reason
        if len(self._violations) < failures.VIOLATIONS_MAX:
            self._violations.append(Violation(field, description))

    def refuse(self, failure: Failure) -> None:
        """The request asks for what does not exist or is not allowed."""
        if self._refusal is None and self._violation_reason is None:
            self._refusal = failure

    def unsupported(self, field: str) -> None:
        """A valid field asks for something that is not honoured here."""
        self._unsupported.append(field)

    def raise_first(self) -> None:
        """Raises Failure if anything was found."""
        if self._refusal is not None:
            raise self._refusal
        if self._violation_reason is not None:
            raise failures.invalid(tuple(self._violations), self._violation_reason)
        if self._unsupported:
            raise Failure(
                Reason.UNSUPPORTED_FEATURE,
                f"not supported here: {', '.join(self._unsupported)}",
                metadata={"field": self._unsupported[0]},
            )

    # -------------------------------------------------------------- rules of many fields

    def check_size(self, field: str, text: str, bytes_max: int, bytes_min: int = 0) -> bool:
        """Whether the text's UTF-8 size is in range; a violation if not."""
        size = len(text.encode())
        if bytes_min <= size <= bytes_max:
            return True
        self.invalid(field, f"has {size} bytes, must have {bytes_min} to {bytes_max}")
        return False

    def check_float(
        self, field: str, value: float, low: float, high: float, *, open_low: bool = False
    ) -> bool:
        """Whether the value is finite and in range; a violation if not."""
        if not math.isfinite(value):
            self.invalid(field, "must be a finite number")
            return False
        if (low < value if open_low else low <= value) and value <= high:
            return True
        bracket = "(" if open_low else "["
        self.invalid(field, f"is {value:g}, must be in {bracket}{low:g}, {high:g}]")
        return False

    def check_integer(self, field: str, value: int, low: int, high: int) -> bool:
        """Whether the value is in range; a violation if not."""
        if low <= value <= high:
            return True
        self.invalid(field, f"is {value}, must be in {low}..{high}")
        return False

    def duration_s(
        self, field: str, duration: duration_pb2.Duration, high_s: float
    ) -> float | None:
        """The duration in seconds if it is well-formed and in (0 s, high_s]; else a violation."""
        seconds, nanos = duration.seconds, duration.nanos
        if abs(seconds) > _DURATION_SECONDS_MAX or abs(nanos) > _NANOS_MAX:
            self.invalid(field, "is no valid duration")
            return None
        if (seconds > 0 and nanos < 0) or (seconds < 0 and nanos > 0):
            self.invalid(field, "is no valid duration: seconds and nanos differ in sign")
            return None
        value_s = seconds + nanos / 1e9
        if self.check_float(field, value_s, 0.0, high_s, open_low=True):
            return value_s
        return None
