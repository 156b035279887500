"""From a token log to its text, as it streams.

Text is a pure function of the log: the bytes of its tokens joined (special tokens empty if
skipped), decoded as UTF-8 with one U+FFFD a broken piece, cut at the first stop string. Held back
are the last bytes that may yet become a stop string (unless stop strings stay in the text), or else
a character that is not whole yet; nothing besides.

    fed bytes   |------ released ------|-- unfinished character --|   without a live prefix
    fed bytes   |------ released ---------|-- live prefix --|         of a stop string, and with one

The two never add up: a stop string begins with the first byte of a character, so whatever is
unfinished in front of a live prefix can no longer be finished. What is unfinished, Python's decoder
says; of bytes that no character has, it waits only for the third of an encoded surrogate.

Must not know: requests, messages' transport, gRPC, time. Called by `generate`, once a delta.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence

from gapless.protos.messages import FinishReason
from gapless.protos.stops import StopMatcher, StopStrings

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclasses.dataclass(frozen=True, slots=True)
class TextOptions:
    """What of a log is text. Equal for all candidates of a request, which share one."""

    pieces: tuple[bytes, ...]
    """``TokenBytes.visible(skip_special_tokens=...)``, as in `Stopping.skip_special_tokens`."""
    automaton: StopStrings | None = None
    """Of `Stopping.stop_strings`; None if there are none."""
    include_stop_in_text: bool = False
    min_new_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    """`Stopping.stop_tokens`."""


class Renderer:
    """The text of one candidate, as its log grows."""

    __slots__ = ("_decoder", "_end", "_held", "_matcher", "_options", "_passed", "_token_count")

    def __init__(self, options: TextOptions) -> None:
        self._options = options
        self._decoder = _Utf8Decoder(errors="replace")
        self._matcher = None if options.automaton is None else StopMatcher(options.automaton)
        self._held = b""
        """Bytes fed to the matcher and not to the decoder: a live prefix of a stop string."""
        self._passed = 0
        """Bytes fed to the matcher and to the decoder."""
        self._token_count = 0
        self._end: FinishReason | None = None
        """How the log has ended by its own tokens: by a stop token or a stop string."""

    def push(self, tokens: Sequence[int]) -> str:
        """Takes the next tokens of the log; returns the text they release (may be empty).

        A stop token or stop string must be in the last token pushed, as the scheduler ends there.
        """
        assert self._end is None, f"a token after {self._end!r}"
        first = self._token_count
        self._token_count += len(tokens)
        options = self._options
        if (
            self._token_count >= options.min_new_tokens
            and tokens
            and tokens[-1] in options.stop_tokens
        ):
            # It ends the sequence and is not text, whatever its bytes; what is held stays held.
            self._end = FinishReason.STOP_TOKEN
            tokens = tokens[:-1]
        pieces = options.pieces
        if self._matcher is None:
            return self._decoder.decode(b"".join([pieces[token] for token in tokens]))
        return self._match([pieces[token] for token in tokens], first)

    def finish(self, reason: FinishReason) -> str:
        """The sequence has ended: returns the held-back rest. Call once, after the last push.

        Asserts that the log agrees where `reason` is STOP_TOKEN or STOP_STRING.
        """
        by_tokens = reason in (FinishReason.STOP_TOKEN, FinishReason.STOP_STRING)
        assert self._end == (reason if by_tokens else None), (self._end, reason)
        return self._decoder.decode(self._held, final=True)

    def _match(self, pieces: list[bytes], first: int) -> str:
        """Like push, where there are stop strings. `first`: tokens in front of `pieces`."""
        matcher = self._matcher
        assert matcher is not None
        buffer = bytearray(self._held)
        for number, piece in enumerate(pieces, first + 1):
            buffer += piece
            match = matcher.feed(piece, ignore=number < self._options.min_new_tokens)
            if match is not None:
                assert self._end is None, "a stop string in front of a stop token"
                assert number == self._token_count, "tokens after a stop string"
                self._end = FinishReason.STOP_STRING
                self._held = b""
                cut = match.end if self._options.include_stop_in_text else match.start
                return self._decoder.decode(bytes(buffer[: cut - self._passed]), final=True)
        # What is shown either way need not wait.
        held = 0 if self._options.include_stop_in_text else matcher.held_bytes
        passing = len(buffer) - held
        self._held = bytes(buffer[passing:])
        self._passed += passing
        return self._decoder.decode(bytes(buffer[:passing]), final=bool(self._held))


def render(options: TextOptions, tokens: Sequence[int], reason: FinishReason) -> str:
    """The text of a whole log: the definition that a stream's concatenation must equal."""
    pieces = [options.pieces[token] for token in tokens]
    if reason is FinishReason.STOP_TOKEN:
        pieces.pop()
    data = b"".join(pieces)
    if reason is FinishReason.STOP_STRING:
        assert options.automaton is not None
        matcher = StopMatcher(options.automaton)
        for number, piece in enumerate(pieces, 1):
            match = matcher.feed(piece, ignore=number < options.min_new_tokens)
            if match is not None:
                data = data[: match.end if options.include_stop_in_text else match.start]
                break
    return data.decode(errors="replace")
