"""A small vocabulary of awkward tokens, and naive references for what a log shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hypothesis import strategies as st

from gapless.gateway.rendering import TextOptions
from gapless.protos.messages import FinishReason
from gapless.protos.stops import StopStrings

FAMILY = "👩‍👩‍👧"
"""Three people and two joiners."""
LETTERS = "ab \n👍é안\u0301"
"""What stop strings are made of; the pieces below spell them in many ways."""

PIECES: tuple[bytes, ...] = (
    b"",  # a special token
    *(bytes([byte]) for byte in sorted({*"👍é안\u0301".encode(), *b"ab \n"})),
    *(letter.encode() for letter in LETTERS),
    *(b"ab", b"ba", b"aa", b" a", b"b\n", b"\n\n", b"a\xf0\x9f", b"\x91\x8db", b"\x8da\xec"),
    *(b"\x80", b"\xff", b"\xc0", b"\xe0\x80", b"\xed\xa0", b"\xf0\x80", b"\xf4\x90", b"\xf0\x9f"),
    *(FAMILY.encode(), FAMILY.encode()[:5], FAMILY.encode()[5:9], FAMILY.encode()[9:]),
    "\ufffd".encode(),
)

token_logs = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)
stop_string_sets = st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What the naive reference makes of a log: its tokens up to the end, and their text."""

    tokens: list[int]
    reason: FinishReason
    text: str


def options_of(
    stop_strings: Sequence[str],
    *,
    stop_tokens: frozenset[int] = frozenset(),
    min_new_tokens: int = 0,
    include_stop_in_text: bool = False,
    pieces: tuple[bytes, ...] = PIECES,
) -> TextOptions:
    """Options with the automaton compiled."""
    encoded = tuple(stop_string.encode() for stop_string in stop_strings)
    return TextOptions(
        pieces=pieces,
        automaton=StopStrings(encoded) if encoded else None,
        include_stop_in_text=include_stop_in_text,
        min_new_tokens=min_new_tokens,
        stop_tokens=stop_tokens,
    )


def outcome(options: TextOptions, stop_strings: Sequence[str], log: Sequence[int]) -> Outcome:
    """Looks at the whole text again after every byte."""
    data = b""
    for number, token in enumerate(log, 1):
        counts = number >= options.min_new_tokens
        if counts and token in options.stop_tokens:
            return Outcome(list(log[:number]), FinishReason.STOP_TOKEN, _shown(data))
        for byte in options.pieces[token]:
            data += bytes([byte])
            ending = [s.encode() for s in stop_strings if data.endswith(s.encode())]
            if counts and ending:
                cut = 0 if options.include_stop_in_text else max(map(len, ending))
                text = _shown(data[: len(data) - cut])
                return Outcome(list(log[:number]), FinishReason.STOP_STRING, text)
    return Outcome(list(log), FinishReason.MAX_NEW_TOKENS, _shown(data))


def released(options: TextOptions, stop_strings: Sequence[str], log: Sequence[int]) -> str:
    """All that can be shown of a log that goes on, by trying every tail."""
    data = b"".join(options.pieces[token] for token in log)
    if not options.include_stop_in_text:
        for size in range(len(data), 0, -1):
            tail = data[-size:]
            if any(s.encode() != tail and s.encode().startswith(tail) for s in stop_strings):
                return _shown(data[:-size])
    for size in (3, 2, 1):
        if data[-size:] in UNFINISHED:
            return _shown(data[:-size])
    return _shown(data)


def _shown(data: bytes) -> str:
    return data.decode(errors="replace")


def _unfinished() -> frozenset[bytes]:
    """Every proper prefix of a character's bytes; to Python's decoder a surrogate is one."""
    found: set[bytes] = set()
    for code in range(0x80, 0x110000, 64):
        encoded = chr(code).encode(errors="surrogatepass")
        found.update(encoded[:size] for size in range(1, len(encoded)))
    return frozenset(found)


UNFINISHED = _unfinished()
