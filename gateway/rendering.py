"""From a token log to its text, as it streams.

Text is a pure function of the log: the bytes of its tokens joined (special tokens empty if
skipped), decoded as UTF-8 with one U+FFFD a broken piece, cut at the first stop string. What may
still become a stop string, or is an unfinished character, is held back, and nothing else.

Must not know: requests, messages, gRPC, time. Called by the stream of each candidate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gapless.protos.messages import FinishReason
from gapless.protos.stops import StopStrings


@dataclasses.dataclass(frozen=True, slots=True)
class TextOptions:
    """What of a log is text. Equal for all candidates of a request; share one."""

    pieces: tuple[bytes, ...]
    """`TokenBytes.visible(skip_special_tokens=...)`: the same as `Stopping.skip_special_tokens`."""
    automaton: StopStrings | None = None
    """Of `Stopping.stop_strings`; None if there are none."""
    include_stop_in_text: bool = False
    min_new_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    """`Stopping.stop_tokens`."""


class Renderer:
    """The text of one candidate."""

    def __init__(self, options: TextOptions) -> None:
        self._options = options

    def push(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens of the log; returns the text they release (may be empty)."""
        return ""

    def finish(self, reason: FinishReason) -> str:
        """The sequence has ended: returns the held-back rest. Call once, after the last push.

        Asserts that the log agrees with `reason` where it is STOP_TOKEN or STOP_STRING.
        """
        return ""


def render(options: TextOptions, tokens: Sequence[int], reason: FinishReason) -> str:
    """The text of a whole log: the definition that a stream's concatenation must equal."""
    return ""
