"""Rendering: streams equal the one-shot text, stop strings never leak, nothing waits needlessly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.gateway.rendering import Renderer, TextOptions, render
from gapless.protos.messages import FinishReason
from tests.gateway_text.logs import (
    FAMILY,
    PIECES,
    options_of,
    outcome,
    released,
    stop_string_sets,
    token_logs,
)

MAX_NEW_TOKENS = FinishReason.MAX_NEW_TOKENS


def stream(
    options: TextOptions, pushes: Iterable[Sequence[int]], reason: FinishReason
) -> list[str]:
    """The texts of a stream's deltas, that of `finish` last."""
    renderer = Renderer(options)
    return [*(renderer.push(tokens) for tokens in pushes), renderer.finish(reason)]


def divided(log: Sequence[int], cuts: Iterable[int]) -> list[Sequence[int]]:
    """The log in consecutive slices that end at `cuts` (any numbers)."""
    borders = [0, *sorted(cut % (len(log) + 1) for cut in cuts), len(log)]
    return [log[start:end] for start, end in itertools.pairwise(borders)]


@given(log=token_logs, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_the_concatenation_is_the_one_shot_text(log: list[int], cuts: list[int]) -> None:
    options = options_of([])
    whole = b"".join(PIECES[token] for token in log).decode(errors="replace")
    assert render(options, log, MAX_NEW_TOKENS) == whole
    assert "".join(stream(options, divided(log, cuts), MAX_NEW_TOKENS)) == whole


@given(
    log=token_logs,
    cuts=st.lists(st.integers(0, 100), max_size=8),
    stop_strings=stop_string_sets,
    stop_tokens=st.frozensets(st.integers(0, len(PIECES) - 1), max_size=3),
    min_new_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_a_log_ends_and_is_cut_as_the_naive_reference_says(
    log: list[int],
    cuts: list[int],
    stop_strings: list[str],
    stop_tokens: frozenset[int],
    min_new_tokens: int,
    include: bool,
) -> None:
    options = options_of(
        stop_strings,
        stop_tokens=stop_tokens,
        min_new_tokens=min_new_tokens,
        include_stop_in_text=include,
    )
    expected = outcome(options, stop_strings, log)
    # None is empty: after the last token even an empty push would come too late.
    pushes = [tokens for tokens in divided(expected.tokens, cuts) if tokens]
    texts = stream(options, pushes, expected.reason)
    assert "".join(texts) == expected.text
    assert render(options, expected.tokens, expected.reason) == expected.text
    for shown in itertools.accumulate(texts):
        assert expected.text.startswith(shown)


@given(log=token_logs, stop_strings=stop_string_sets, include=st.booleans())
def test_everything_that_may_be_shown_is_shown_at_once(
    log: list[int], stop_strings: list[str], include: bool
) -> None:
    options = options_of(stop_strings, include_stop_in_text=include)
    expected = outcome(options, stop_strings, log)
    if expected.reason is FinishReason.STOP_STRING:
        log = expected.tokens[:-1]
    renderer, shown = Renderer(options), ""
    for count, token in enumerate(log, 1):
        shown += renderer.push([token])
        assert shown == released(options, stop_strings, log[:count])


@given(log=token_logs)
def test_without_stop_strings_only_an_unfinished_character_waits(log: list[int]) -> None:
    options = options_of([])
    renderer, shown = Renderer(options), ""
    for count, token in enumerate(log, 1):
        shown += renderer.push([token])
        assert shown == released(options, [], log[:count])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop_string", ["b\n", "안", FAMILY, " 👍é", "aab"])
def test_no_division_of_the_text_into_tokens_leaks_a_stop_string(
    stop_string: str, include: bool
) -> None:
    text = "aé" + stop_string[:-1] + "a" + stop_string + "tail"
    data = text.encode()
    expected = text[: text.index(stop_string) + (len(stop_string) if include else 0)]
    for first, second in itertools.combinations(range(1, len(data)), 2):
        pieces = (data[:first], data[first:second], data[second:])
        options = options_of([stop_string], include_stop_in_text=include, pieces=pieces)
        end = outcome(options, [stop_string], [0, 1, 2])
        texts = stream(options, [[token] for token in end.tokens], end.reason)
        assert end.reason is FinishReason.STOP_STRING
        assert "".join(texts) == expected


@pytest.mark.parametrize(
    "text", [FAMILY, "👍🏽", "안녕", "e\u0301o\u0308", "🏳️‍🌈", "नमस्ते", "\u200b\ufeff\U0010ffff"]
)
def test_a_character_is_never_split(text: str) -> None:
    data = text.encode()
    for size in (1, 2, 3, 5):
        pieces = tuple(data[start : start + size] for start in range(0, len(data), size))
        options = options_of([], pieces=pieces)
        texts = stream(options, [[token] for token in range(len(pieces))], MAX_NEW_TOKENS)
        assert "".join(texts) == text
        assert "\ufffd" not in "".join(texts)
        assert texts[-1] == ""


def test_stray_bytes_show_at_once_and_one_mark_each() -> None:
    options = options_of([], pieces=(b"\x80", b"\xf0\x9f"))
    assert stream(options, [[0]] * 8, MAX_NEW_TOKENS) == ["\ufffd"] * 8 + [""]
    # Each lead byte proves the character in front of it broken.
    assert stream(options, [[1]] * 4, MAX_NEW_TOKENS) == [""] + ["\ufffd"] * 4


def test_a_leading_blank_is_kept() -> None:
    options = options_of([], pieces=(b" ", b"8", b","))
    assert stream(options, [[0], [1], [2]], MAX_NEW_TOKENS) == [" ", "8", ",", ""]


@pytest.mark.parametrize(
    "reason",
    [MAX_NEW_TOKENS, FinishReason.CONTEXT_LENGTH, FinishReason.TIME_LIMIT, FinishReason.CANCELLED],
)
def test_held_text_is_released_when_the_end_comes_first(reason: FinishReason) -> None:
    options = options_of(["aaab"], pieces=(b"a",))
    assert stream(options, [[0]] * 5, reason) == ["", "", "", "a", "a", "aaa"]


def test_held_text_is_released_by_a_stop_token_whose_own_text_is_not_shown() -> None:
    options = options_of(["4.\nAAAA"], pieces=(b" 4", b".", b"\nAAAA"), stop_tokens=frozenset({2}))
    assert stream(options, [[0], [1], [2]], FinishReason.STOP_TOKEN) == [" ", "", "", "4."]
    # The stop token completes the stop string, and wins.
    assert render(options, [0, 1, 2], FinishReason.STOP_TOKEN) == " 4."


def test_stops_before_min_new_tokens_are_text() -> None:
    options = options_of([" a"], pieces=(b" a",), min_new_tokens=3)
    assert stream(options, [[0], [0], [0]], FinishReason.STOP_STRING) == [" a", " a", "", ""]
    options = options_of([], pieces=(b" a",), min_new_tokens=3, stop_tokens=frozenset({0}))
    assert stream(options, [[0], [0], [0]], FinishReason.STOP_TOKEN) == [" a", " a", "", ""]


def test_an_unfinished_character_in_front_of_a_live_prefix_does_not_wait() -> None:
    options = options_of(["ab"], pieces=(b"\xf0\x9f", b"a"))
    assert stream(options, [[0], [1]], MAX_NEW_TOKENS) == ["", "\ufffd", "a"]


def test_a_disagreement_with_the_scheduler_is_a_bug() -> None:
    options = options_of(["ab"], pieces=(b"a", b"b"), stop_tokens=frozenset({0}))
    renderer = Renderer(options)
    renderer.push([1])
    with pytest.raises(AssertionError):
        renderer.finish(FinishReason.STOP_STRING)
    renderer.push([0])
    with pytest.raises(AssertionError):
        renderer.finish(MAX_NEW_TOKENS)
    with pytest.raises(AssertionError):
        renderer.push([1])
