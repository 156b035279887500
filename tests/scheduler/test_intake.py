"""The array form of the stop rules against their plain form."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gapless.protos.messages import Epoch, Finished, Submit, Vocabulary
from gapless.scheduler.admission import sequence_of
from gapless.scheduler.core import Core
from gapless.scheduler.intake import TokenTexts
from gapless.scheduler.request import Stop, stop_of
from tests.scheduler.words import GATEWAY, config, events_of, result_of, submit, tokens_of

TEXTS = (b"a", b"b", b"ab", b"ba", b"", b"c")


def vocabulary() -> Vocabulary:
    ends = np.cumsum([len(text) for text in TEXTS]).astype(np.uint32)
    return Vocabulary(b"".join(TEXTS), ends.tobytes(), bytes([0, 0, 0, 0, 0, 1]))


@st.composite
def requests(draw: st.DrawFn) -> Submit:
    new_tokens = draw(st.integers(1, 8))
    return submit(
        draw(st.integers(1, 4)),
        max_new_tokens=new_tokens,
        min_new_tokens=draw(st.integers(0, new_tokens)),
        stop_tokens=tuple(draw(st.lists(st.integers(0, 5), max_size=6, unique=True))),
        stop_strings=tuple(
            draw(st.lists(st.sampled_from([b"aba", b"bb", b"c", b"a"]), max_size=2))
        ),
        skip_special_tokens=draw(st.booleans()),
    )


def plain(word: Submit, tokens: list[int]) -> tuple[int, Stop] | None:
    """How many tokens a sequence takes, and why it stops then; None if it goes on."""
    sequence, texts = sequence_of(word, config(), GATEWAY, 1, 0.0), TokenTexts(vocabulary())
    for count, token in enumerate(tokens, 1):
        text = texts.text(token, skip_special=word.stopping.skip_special_tokens)
        stop = stop_of(sequence, token, sequence.prompt_length + count, text)
        if stop is not None:
            return count, stop
    return None


@given(
    st.lists(requests(), min_size=1, max_size=4, unique_by=lambda word: word.handle),
    st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=8, max_size=8),
)
def test_all_rows_at_once_stop_as_each_would_alone(
    words: list[Submit], columns: list[list[int]]
) -> None:
    core = Core(config(step_tokens_max=64, depth=1, block_count=40), Epoch(1))
    core.set_vocabulary(vocabulary())
    for word in words:
        core.submit(0.0, GATEWAY, word)
    for column in columns:
        frame = core.build(0.0) if core.can_build() else None
        if frame is None:
            break
        result = result_of(frame)
        result.tokens[:] = [column[seat - 1] for seat in frame.rows.seat.tolist()]
        core.result(0.0, result)
        core.check()
    updates = core.take_updates()
    finished = {e.handle: e for e in events_of(updates) if isinstance(e, Finished)}
    assert len(finished) == len(words), "eight tokens end everybody"
    for place, word in enumerate(words):
        expected = plain(word, [column[place] for column in columns])
        event = finished[word.handle]
        assert expected is not None
        count, stop = expected
        assert event.completion_tokens == count
        assert (event.reason, event.stop_token) == (stop.reason, stop.stop_token)
        assert event.stop_string_index == stop.stop_string_index
        taken = [token for handle, token in tokens_of(updates) if handle == word.handle]
        assert taken == [column[place] for column in columns[:count]]


def test_texts_of_tokens() -> None:
    texts = TokenTexts(vocabulary())
    assert [texts.text(token, skip_special=False) for token in range(6)] == list(TEXTS)
    assert texts.text(5, skip_special=True) == b""
    assert texts.text(6, skip_special=False) == b"", "an id the tokenizer does not have"
