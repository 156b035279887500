"""The stop matcher against a reference that searches the whole text after every byte."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.protos.stops import Match, StopMatcher, StopStrings

Piece = tuple[bytes, bool]
"""A token's bytes, and whether its matches are ignored."""


def reference(stop_strings: tuple[bytes, ...], pieces: list[Piece]) -> Match | None:
    """The first match to end, the longest of those, in pieces that are not ignored."""
    text = b""
    for data, ignore in pieces:
        for byte in data:
            text += bytes([byte])
            ending = [s for s in stop_strings if text.endswith(s)]
            if ending and not ignore:
                longest = max(ending, key=len)
                return Match(stop_strings.index(longest), len(text), len(text) - len(longest))
    return None


def reference_held(stop_strings: tuple[bytes, ...], text: bytes) -> int:
    """Longest suffix of `text` that is a proper prefix of a stop string."""
    longest = max(map(len, stop_strings)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(s) > size and s.startswith(tail) for s in stop_strings):
            return size
    return 0


def feed_all(stop_strings: tuple[bytes, ...], pieces: list[Piece]) -> Match | None:
    """Feeds until a match; checks the hold-back after every piece."""
    matcher = StopMatcher(StopStrings(stop_strings))
    text = b""
    for data, ignore in pieces:
        match = matcher.feed(data, ignore=ignore)
        if match is not None:
            return match
        text += data
        assert matcher.held_bytes == reference_held(stop_strings, text), text
    return None


def cut(text: bytes, borders: list[int]) -> list[bytes]:
    edges = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


tiny_bytes = st.lists(st.sampled_from([b"a", b"b", b"c"])).map(b"".join)
tiny_stops = st.lists(tiny_bytes.filter(bool), min_size=1, max_size=5).map(tuple)
characters = st.text(st.sampled_from("aé한👍🏽‍́") | st.characters(codec="utf-8"), max_size=12)
utf8_stops = st.lists(characters.filter(bool).map(str.encode), min_size=1, max_size=4).map(tuple)
borders = st.lists(st.integers(0, 99), max_size=8)


@given(tiny_stops, tiny_bytes, borders, st.integers(0, 8))
def test_matches_as_the_reference_over_a_tiny_alphabet(
    stop_strings: tuple[bytes, ...], text: bytes, where: list[int], ignored: int
) -> None:
    pieces = [(data, k < ignored) for k, data in enumerate(cut(text, where))]
    assert feed_all(stop_strings, pieces) == reference(stop_strings, pieces)


@given(utf8_stops, st.data(), borders)
def test_matches_as_the_reference_over_any_text(
    stop_strings: tuple[bytes, ...], data: st.DataObject, where: list[int]
) -> None:
    parts = data.draw(
        st.lists(characters.map(str.encode) | st.sampled_from(stop_strings), max_size=5)
    )
    pieces = [(piece, False) for piece in cut(b"".join(parts), where)]
    match = feed_all(stop_strings, pieces)
    assert match == reference(stop_strings, pieces)
    if match is not None:  # a match of bytes is a match of characters
        text = b"".join(parts)
        text[: match.start].decode()
        text[: match.end].decode()


@given(tiny_stops, tiny_bytes)
def test_every_split_gives_the_same_answer(stop_strings: tuple[bytes, ...], text: bytes) -> None:
    whole = feed_all(stop_strings, [(text, False)])
    for border in range(len(text) + 1):
        split = [(text[:border], False), (text[border:], False)]
        assert feed_all(stop_strings, split) == whole, border
    single = [(bytes([byte]), False) for byte in text]
    assert feed_all(stop_strings, single) == whole


@given(utf8_stops, characters, characters)
def test_invalid_bytes_do_no_harm(stop_strings: tuple[bytes, ...], before: str, after: str) -> None:
    pieces = [(before.encode(), False), (b"\xff\xf0\x9f", False), (after.encode(), False)]
    assert feed_all(stop_strings, pieces) == reference(stop_strings, pieces)


@pytest.mark.parametrize(
    ("stop_strings", "text", "expected"),
    [
        ((b"b", b"abc"), b"xabc", Match(0, 3, 2)),  # the first to end counts
        ((b"c", b"abc"), b"xabc", Match(1, 4, 1)),  # of those that end there, the longest
        ((b"ab", b"ab"), b"ab", Match(0, 2, 0)),  # a repeat: the caller's first
        ((b"abcd", b"bc"), b"abce", Match(1, 3, 1)),
        ((b"abab",), b"abaabab", Match(0, 7, 3)),
        ((b"x",), b"abc", None),
    ],
)
def test_examples(stop_strings: tuple[bytes, ...], text: bytes, expected: Match | None) -> None:
    assert feed_all(stop_strings, [(text, False)]) == expected


def test_an_ignored_match_never_counts_but_its_bytes_do() -> None:
    stop_strings = (b"END", b"NDx")
    matcher = StopMatcher(StopStrings(stop_strings))
    assert matcher.feed(b"END", ignore=True) is None
    assert matcher.held_bytes == 2
    assert matcher.feed(b"x") == Match(1, 4, 1)


def test_an_automaton_needs_stop_strings_with_content() -> None:
    with pytest.raises(AssertionError):
        StopStrings(())
    with pytest.raises(AssertionError):
        StopStrings((b"a", b""))
