"""Tokenising: special tokens, offsets in bytes, truncation, control tokens as plain text."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gapless.gateway.templates import PromptText
from gapless.gateway.tokenizer import Encoded, TextTokenizer
from gapless.gateway.vocabulary import UnsupportedTokenizer
from tests.gateway_text import toys

TURN, END = "<|turn|>", "<|end|>"
TEXTS = st.text("hello in 안é👍\n\0<|>" + "\u0301", max_size=30)


@functools.cache
def turn_tokenizer(**end_flags: bool) -> TextTokenizer:
    """Byte-level, with turn marks 262 and 263, and 264 a visible added token."""
    tokens = [
        toys.added(262, TURN),
        toys.added(263, END, **end_flags),
        toys.added(264, "<tool>", special=False),
    ]
    return TextTokenizer(toys.byte_level(tokens, post_processor=toys.bos_in_front(TURN, 262)))


@functools.cache
def styled_tokenizer(style: str) -> TextTokenizer:
    return TextTokenizer(toys.sentencepiece(style))


def encode(tokenizer: TextTokenizer, text: str, **options: Any) -> Encoded:
    options.setdefault("add_special_tokens", False)
    return tokenizer.encode(PromptText(text), with_offsets=True, **options)


@given(text=TEXTS)
def test_byte_level_tokens_tile_the_text(text: str) -> None:
    tokenizer = turn_tokenizer()
    encoded = encode(tokenizer, text)
    data = text.encode()
    borders = [0, *encoded.end_bytes]
    assert encoded.start_bytes == borders[:-1]
    assert borders[-1] == len(data)
    cut = [data[s:e] for s, e in zip(encoded.start_bytes, encoded.end_bytes, strict=True)]
    assert cut == [tokenizer.token_bytes.pieces[token] for token in encoded.token_ids]
    assert tokenizer.detokenize(encoded.token_ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("style", ["llama", "mistral", "gemma", "unigram"])
@given(text=TEXTS)
def test_sentencepiece_offsets_tile_the_text_less_its_first_blank(style: str, text: str) -> None:
    tokenizer = styled_tokenizer(style)
    encoded = encode(tokenizer, text)
    borders = [0, *encoded.end_bytes]
    assert encoded.start_bytes == borders[:-1]
    assert borders[-1] == len(text.encode())


def test_characters_of_several_tokens_are_cut_in_bytes() -> None:
    encoded = encode(turn_tokenizer(), f"é {END}n")
    assert encoded.token_ids == [0xC3, 0xA9, 0x20, 263, 0x6E]
    assert encoded.start_bytes == [0, 1, 2, 3, 10]
    assert encoded.end_bytes == [1, 2, 3, 10, 11]


def test_added_special_tokens_are_no_text() -> None:
    tokenizer = turn_tokenizer()
    encoded = encode(tokenizer, "in", add_special_tokens=True)
    assert encoded == Encoded([262, 261], [0, 0], [0, 2])
    assert tokenizer.encode(PromptText("in"), add_special_tokens=False).token_ids == [261]


def test_a_blank_put_in_front_is_no_text() -> None:
    tokenizer = TextTokenizer(toys.byte_level([], add_prefix_space=True))
    assert encode(tokenizer, "hello in") == Encoded([260, 0x20, 261], [0, 5, 6], [5, 6, 8])


def test_rewritten_text_gets_the_tokenizers_own_spans() -> None:
    tokenizer = TextTokenizer(toys.byte_level([], normalizer={"type": "NFC"}))
    # Two characters become one, whose second byte gets an empty span.
    encoded = encode(tokenizer, "ae\u0301b")
    assert encoded.token_ids == [0x61, 0xC3, 0xA9, 0x62]
    assert encoded.start_bytes == [0, 1, 2, 4]
    assert encoded.end_bytes == [1, 2, 2, 5]
    # A blank that a mark swallows is in no token.
    encoded = encode(turn_tokenizer(rstrip=True), f"a{END}  in")
    assert (encoded.start_bytes, encoded.end_bytes) == ([0, 1, 10], [1, 10, 12])


def test_truncation_keeps_the_end() -> None:
    tokenizer = turn_tokenizer()
    assert encode(tokenizer, "abc", truncate_to_last_tokens=2) == Encoded(
        [0x62, 0x63], [1, 2], [2, 3]
    )
    assert encode(tokenizer, "abc", truncate_to_last_tokens=9).token_ids == [0x61, 0x62, 0x63]


def test_length_limits_of_the_file_are_not_applied() -> None:
    description = toys.byte_level([])
    description["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    description["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    assert encode(TextTokenizer(description), "abc").token_ids == [0x61, 0x62, 0x63]


def test_control_tokens_are_recognised_in_plain_prompts() -> None:
    assert encode(turn_tokenizer(), f"{TURN}in{END}").token_ids == [262, 261, 263]


def test_parts_say_which_spellings_are_control_tokens() -> None:
    tokenizer = turn_tokenizer()
    parts = ("", TURN, f"in{END}<tool>", END, "\n")
    prompt = PromptText("".join(parts), parts)
    encoded = tokenizer.encode(prompt, add_special_tokens=False, with_offsets=True)
    assert encoded.token_ids == [262, 261, *END.encode(), 264, 263, 0x0A]
    assert encoded.end_bytes[-1] == len(prompt.text)
    assert tokenizer.detokenize(encoded.token_ids, skip_special_tokens=False) == prompt.text


def test_parts_keep_the_rules_around_control_tokens() -> None:
    tokenizer = turn_tokenizer(rstrip=True)
    parts = (f"{END}", END, "  in")
    encoded = tokenizer.encode(
        PromptText("".join(parts), parts), add_special_tokens=False, with_offsets=True
    )
    assert encoded.token_ids == [*END.encode(), 263, 261]
    assert encoded.start_bytes == [*range(7), 7, 16]
    assert encoded.end_bytes == [*range(1, 8), 16, 18]


@pytest.mark.parametrize("style", ["llama", "mistral", "gemma", "unigram"])
@given(texts=st.lists(st.text("hello w\n안", max_size=8), min_size=1, max_size=4))
def test_parts_without_spellings_inside_are_tokenised_like_the_whole(
    style: str, texts: list[str]
) -> None:
    tokenizer = styled_tokenizer(style)
    parts = tuple(piece for text in texts for piece in (text, "</s>"))[:-1]
    prompt = PromptText("".join(parts))
    for add_special_tokens in (False, True):
        plain = tokenizer.encode(prompt, add_special_tokens=add_special_tokens, with_offsets=True)
        cut = tokenizer.encode(
            PromptText(prompt.text, parts),
            add_special_tokens=add_special_tokens,
            with_offsets=True,
        )
        assert cut == plain


def test_added_tokens_that_the_model_lacks_are_plain_text() -> None:
    description = toys.byte_level([toys.added(262, TURN), toys.added(263, END)])
    tokenizer = TextTokenizer(description, 263)
    assert encode(tokenizer, f"{TURN}{END}").token_ids == [262, *END.encode()]
    assert tokenizer.control_tokens == (TURN,)
    assert tokenizer.token_of(END) is None
    with pytest.raises(UnsupportedTokenizer, match="262 tokens"):
        TextTokenizer(description, 261)


def test_invalid_bytes_are_one_mark_a_piece() -> None:
    tokenizer = turn_tokenizer()
    assert tokenizer.detokenize([0x80] * 3 + [0xF0, 0x9F], skip_special_tokens=True) == "\ufffd" * 4
    assert tokenizer.detokenize([262, 0x20, 264], skip_special_tokens=True) == " <tool>"
    assert tokenizer.detokenize([], skip_special_tokens=True) == ""


def write_folder(path: Path, description: dict[str, Any], **files: dict[str, Any]) -> Path:
    (path / "tokenizer.json").write_text(json.dumps(description))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("files", "vocab_size", "bos_token"),
    [
        ({"config": {"vocab_size": 300}}, 300, None),
        ({"config": {"text_config": {"vocab_size": 300}, "bos_token_id": 5}}, 300, 5),
        ({"config": {}, "tokenizer_config": {"bos_token": TURN}}, 263, 262),
        ({"config": {}, "tokenizer_config": {"bos_token": {"content": TURN}}}, 263, 262),
        ({"config": {"bos_token_id": 7}, "tokenizer_config": {"bos_token": None}}, 263, 7),
    ],
)
def test_a_model_folder(
    tmp_path: Path, files: dict[str, dict[str, Any]], vocab_size: int, bos_token: int | None
) -> None:
    folder = write_folder(tmp_path, toys.byte_level([toys.added(262, TURN)]), **files)
    tokenizer = TextTokenizer.load(folder)
    assert (tokenizer.vocab_size, tokenizer.bos_token) == (vocab_size, bos_token)


def test_threads_share_a_tokenizer() -> None:
    tokenizer = turn_tokenizer()
    parts = (f"in{END} hello" * 50, END, "")
    prompt = PromptText("".join(parts), parts)
    expected = [*([261, *END.encode(), 260] * 50), 263]
    results: list[list[int]] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        results.append(tokenizer.encode(prompt, add_special_tokens=False).token_ids)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 8


@pytest.mark.model
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_the_demo_tokenizer_shows_any_tokens_as_its_decoder_does(
    demo_tokenizer: TextTokenizer, demo_decoder: Tokenizer, ids: list[int]
) -> None:
    for skip in (False, True):
        ours = demo_tokenizer.detokenize(ids, skip_special_tokens=skip)
        assert ours == demo_decoder.decode(ids, skip_special_tokens=skip)


@pytest.mark.model
@given(text=st.text(max_size=60))
def test_the_demo_tokenizer_brings_any_text_back(demo_tokenizer: TextTokenizer, text: str) -> None:
    # Its vocabulary lacks some bytes (a few control characters, unassigned planes): no text of it.
    known = set(demo_tokenizer.token_bytes.pieces)
    text = "".join(c for c in text if all(bytes([byte]) in known for byte in c.encode()))
    encoded = encode(demo_tokenizer, text)
    assert demo_tokenizer.detokenize(encoded.token_ids, skip_special_tokens=False) == text
    assert [0, *encoded.end_bytes][-1] == len(text.encode())
