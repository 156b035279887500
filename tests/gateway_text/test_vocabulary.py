"""Token bytes: they agree with the tokenizers' own decoder, or the tokenizer is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gapless.gateway.tokenizer import TextTokenizer
from gapless.gateway.vocabulary import TokenBytes, UnsupportedTokenizer, read_token_bytes
from tests.gateway_text import toys

STYLES = ("llama", "mistral", "gemma", "unigram")


def test_byte_level_tokens_are_bytes() -> None:
    table = read_token_bytes(toys.byte_level([]), None)
    assert table.pieces[:256] == tuple(bytes([byte]) for byte in range(256))
    assert table.pieces[256:] == (b"he", b"ll", b"hell", b"hello", b" hello", b"in")
    assert not any(table.special)


def test_sentencepiece_tokens_are_bytes() -> None:
    table = read_token_bytes(toys.sentencepiece("llama"), None)
    assert table.pieces[:3] == (b"<unk>", b"<s>", b"</s>")
    assert table.pieces[3 : 3 + 256] == tuple(bytes([byte]) for byte in range(256))
    assert table.pieces[259:262] == (b" ", b" hello", b" world")
    assert table.shown[:4] == (b"", b"", b"", b"\0")
    assert bytes(table.special) == b"\1\1\1" + bytes(len(table.pieces) - 3)


def test_without_byte_fallback_the_spelling_of_a_byte_is_text() -> None:
    description = toys.sentencepiece("unigram", byte_fallback=False)
    description["decoder"] = description["pre_tokenizer"]
    description["model"]["vocab"].append(["<0x41>", -1.0])
    assert read_token_bytes(description, None).pieces[-1] == b"<0x41>"


@pytest.mark.parametrize("style", STYLES)
@given(data=st.data())
def test_the_bytes_are_those_of_the_tokenizers_decoder(style: str, data: st.DataObject) -> None:
    description = toys.sentencepiece(style)
    table = read_token_bytes(description, None)
    text = data.draw(st.text("hello wrd안é👍\n<", max_size=20))
    tokenizer = Tokenizer.from_str(json.dumps(description))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    ours = b"".join(table.pieces[token] for token in ids).decode()
    # The decoder drops one blank that the normaliser may have put in front.
    assert ours in (text, " " + text)
    assert tokenizer.decode(ids, skip_special_tokens=False) in (ours, ours.removeprefix(" "))


@given(ids=st.lists(st.integers(0, 261), max_size=20))
def test_byte_level_bytes_agree_on_any_tokens(ids: list[int]) -> None:
    description = toys.byte_level([])
    table = read_token_bytes(description, None)
    theirs = Tokenizer.from_str(json.dumps(description)).decode(ids)
    assert b"".join(table.pieces[token] for token in ids).decode(errors="replace") == theirs


def test_the_model_may_have_more_ids_than_the_tokenizer() -> None:
    table = read_token_bytes(toys.byte_level([toys.added(270, "<end>")]), 280)
    assert len(table.pieces) == 280
    assert table.pieces[262:270] == (b"",) * 8  # a hole
    assert table.pieces[270] == b"<end>"
    assert table.special[270] == 1
    assert table.pieces[271:] == (b"",) * 9  # padding


def test_added_tokens_are_their_spelling() -> None:
    table = read_token_bytes(
        toys.byte_level([toys.added(262, "<｜é▁｜>"), toys.added(263, "café", special=False)]), None
    )
    assert table.pieces[262] == "<｜é▁｜>".encode()
    assert table.pieces[263] == "café".encode()
    assert table.shown[262:] == (b"", "café".encode())


def test_the_message_holds_every_token() -> None:
    table = TokenBytes.of((b"ab", b"", b"c"), b"\0\0\1")
    message = table.message()
    assert message.data == b"abc"
    assert np.frombuffer(message.ends, "<u4").tolist() == [2, 2, 3]
    assert message.special == b"\0\0\1"
    assert table.visible(skip_special_tokens=True) == (b"ab", b"", b"")
    assert table.visible(skip_special_tokens=False) == (b"ab", b"", b"c")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder": None}, "without a decoder"),
        ({"decoder": {"type": "CTC"}}, "CTC"),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}]}}, "Fuse"),
        ({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}, "BPEDecoder"),
        (
            {
                "decoder": {
                    "type": "Sequence",
                    "decoders": [
                        {"type": "Replace", "pattern": {"String": "▁"}, "content": "_"},
                        {"type": "Fuse"},
                    ],
                }
            },
            "Replace",
        ),
    ],
)
def test_other_decoders_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=words):
        read_token_bytes({**toys.sentencepiece("llama"), **change}, None)


def test_other_models_are_refused() -> None:
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        read_token_bytes(toys.word_piece(), None)
    description = toys.byte_level([])
    description["model"]["end_of_word_suffix"] = "</w>"
    with pytest.raises(UnsupportedTokenizer, match="suffix"):
        read_token_bytes(description, None)


def test_a_decoder_that_shows_other_text_is_refused() -> None:
    description = toys.byte_level([])
    # Bytes of a byte-level model behind a decoder for blanks: plausible, and wrong.
    description["decoder"] = {"type": "Metaspace", "replacement": "Ġ", "prepend_scheme": "never"}
    with pytest.raises(UnsupportedTokenizer):
        TextTokenizer(description)
    description = toys.sentencepiece("gemma")
    description["decoder"] = toys.byte_level([])["decoder"]
    TextTokenizer(description)  # the letters of this toy are spelled alike in both
