"""The bytes of every token, read from ``tokenizer.json`` alone.

Owns how a decoder turns a token's spelling into bytes: byte-level BPE (the GPT-2 alphabet: Llama-3,
Qwen, SmolLM) and SentencePiece-like pieces (``▁`` for a blank, byte fallback ``<0xAB>``: Llama-2,
Mistral, Gemma). A tokenizer of another kind is refused rather than shown wrong.

No blank is trimmed from the front of a text: what a model writes first may begin with one.

Must not know: text, prompts, requests. Called by `tokenizer` once, at start.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from gapless.protos.messages import Vocabulary

BLANK: Final = "▁"
"""How SentencePiece spells a blank."""

SAMPLE_TEXTS: Final = (
    "Hello world, it's 2024: 1234567 tokens!",
    "  two blanks,\n\n\ttabs \r\n and   runs of them   ",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # comment",
    "né naïve Ωμέγα Привет שלום عربي हिन्दी ไทย",
    "中文字符 日本語テキスト 안녕하세요",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200b\ufeff",
    "a\0b \x7f \u00a0 \u2028 <|x|> </x> [X]",
)
"""Texts of many scripts on which the bytes read here must agree with the tokenizer's decoder."""


class UnsupportedTokenizer(Exception):  # noqa: N818 - named by what happened
    """The tokenizer is of a kind whose tokens have no bytes of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of every token of a model's vocabulary; index = token id."""

    pieces: tuple[bytes, ...]
    """The bytes of each token, those of special tokens being their spelling; b"" for a hole."""
    shown: tuple[bytes, ...]
    """The same with special tokens empty: what the text shows when it skips them."""
    special: bytes
    """One byte a token: 1 if it is a special (control) token."""

    @classmethod
    def of(cls, pieces: tuple[bytes, ...], special: bytes) -> TokenBytes:
        """Derives `shown`."""
        assert len(pieces) == len(special), (len(pieces), len(special))
        shown = tuple(
            b"" if is_special else piece for piece, is_special in zip(pieces, special, strict=True)
        )
        return cls(pieces, shown, special)

    def visible(self, *, skip_special_tokens: bool) -> tuple[bytes, ...]:
        """What each token adds to the text."""
        return self.shown if skip_special_tokens else self.pieces

    def message(self) -> Vocabulary:
        """The form that travels to the scheduler."""
        lengths = np.fromiter(map(len, self.pieces), dtype=np.int64, count=len(self.pieces))
        ends = np.cumsum(lengths)
        assert not len(ends) or int(ends[-1]) < 2**32, int(ends[-1])
        return Vocabulary(b"".join(self.pieces), ends.astype("<u4").tobytes(), self.special)


def read_token_bytes(description: Mapping[str, Any], vocab_size: int | None) -> TokenBytes:
    """Reads the bytes of ids 0..vocab_size-1 from a parsed ``tokenizer.json``.

    `vocab_size` None means as many as the tokenizer has. It may exceed that (padding: such ids are
    empty) or fall short of it (ids beyond the model's are left out).
    Raises UnsupportedTokenizer.
    """
    spelling_bytes = _spelling_reader(description)
    by_id: dict[int, bytes] = {}
    for spelling, token in _model_vocabulary(description["model"]):
        by_id[token] = spelling_bytes(spelling)
    special_ids: set[int] = set()
    for added in description.get("added_tokens") or ():
        # Matched in the raw text before the model sees it, so its bytes are its spelling's.
        by_id[added["id"]] = added["content"].encode()
        if added["special"]:
            special_ids.add(added["id"])
    size = vocab_size if vocab_size is not None else max(by_id, default=-1) + 1
    pieces = tuple(by_id.get(token, b"") for token in range(size))
    special = bytearray(size)
    for token in special_ids:
        if token < size:
            special[token] = 1
    return TokenBytes.of(pieces, bytes(special))


def check_agreement(tokenizer: Tokenizer, table: TokenBytes) -> None:
    """Compares the bytes with the tokenizer's own decoder on sample texts.

    Raises UnsupportedTokenizer, naming the text, if they differ.
    """
    for text in SAMPLE_TEXTS:
        ids = [
            token
            for token in tokenizer.encode(text, add_special_tokens=False).ids
            if token < len(table.pieces)
        ]
        ours = b"".join(table.pieces[token] for token in ids).decode(errors="replace")
        theirs = tokenizer.decode(ids, skip_special_tokens=False)
        # A decoder may drop the blank that its normaliser put in front; a stream must keep it.
        if ours not in (theirs, " " + theirs):
            raise UnsupportedTokenizer(
                f"token bytes and the tokenizer's decoder disagree: {ours!r} against {theirs!r}"
            )


def _model_vocabulary(model: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Spelling and id of every token of the model itself."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [spelling, score] by id
        return [(entry[0], token) for token, entry in enumerate(vocabulary)]
    return list(vocabulary.items())


def _spelling_reader(description: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Chooses how a spelling becomes bytes, from the decoder. Raises UnsupportedTokenizer."""
    kind = description["model"].get("type")
    if kind not in ("BPE", "Unigram"):
        raise UnsupportedTokenizer(f"a tokenizer model of type {kind}")
    if description["model"].get("end_of_word_suffix") or description["model"].get(
        "continuing_subword_prefix"
    ):
        raise UnsupportedTokenizer("a tokenizer whose pieces carry a word suffix or prefix")
    decoder = description.get("decoder")
    if decoder is None:
        raise UnsupportedTokenizer("a tokenizer without a decoder")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return _ByteLevel()
    if _is_sentencepiece(steps):
        return _SentencePiece("ByteFallback" in names)
    raise UnsupportedTokenizer(f"a tokenizer with the decoder {' + '.join(names)}")


def _is_sentencepiece(steps: list[Mapping[str, Any]]) -> bool:
    """Whether the decoder only turns ``▁`` into a blank, bytes into bytes, and trims the front."""
    blank_count = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                blank_count += 1
            case {"type": "Metaspace", "replacement": "▁"}:
                blank_count += 1
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
                pass
            case _:
                return False
    return blank_count == 1


class _ByteLevel:
    """Each character of a spelling stands for one byte (the alphabet of GPT-2)."""

    def __init__(self) -> None:
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        stand_ins = itertools.count(0x100)
        self._byte_of = {
            chr(byte if byte in printable else next(stand_ins)): byte for byte in range(256)
        }

    def __call__(self, spelling: str) -> bytes:
        try:
            return bytes([self._byte_of[character] for character in spelling])
        except KeyError:
            return spelling.encode()


class _SentencePiece:
    """``▁`` is a blank; ``<0xAB>`` is a byte, where the decoder says so."""

    def __init__(self, byte_fallback: bool) -> None:
        self._byte_of = (
            {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if byte_fallback else {}
        )

    def __call__(self, spelling: str) -> bytes:
        byte = self._byte_of.get(spelling)
        return spelling.replace(BLANK, " ").encode() if byte is None else byte
