"""Text to token ids and back.

Owns the model folder's tokenizer. Everything here is thread-safe, and tokenising releases the GIL,
so `preparation` runs it in a few threads.

Must not know: templates (it gets a `PromptText`), requests, gRPC. Made by `model`, called by
`preparation` and, for Detokenize, by the servicer.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from gapless.gateway.templates import PromptText
from gapless.gateway.vocabulary import (
    TokenBytes,
    UnsupportedTokenizer,
    check_agreement,
    read_token_bytes,
)

_Positions = np.ndarray[Any, np.dtype[np.int64]]


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A tokenised prompt."""

    token_ids: list[int]
    start_bytes: list[int]
    """Where each token starts in `PromptText.text`, in UTF-8 bytes; empty if not asked for.

    Where the bytes of the tokens, joined, are the text, they tile it without gap or overlap, also
    inside a character. Where they are not (the tokenizer rewrites text before it cuts it), the
    tokenizer's own character spans are given, moved forward where they overlap. A token that stands
    for no text (a BOS that the tokenizer added) is empty.
    """
    end_bytes: list[int]
    """Where it ends, exclusive."""


class TextTokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, description: Mapping[str, Any], vocab_size: int | None = None) -> None:
        """From a parsed ``tokenizer.json``. `vocab_size` is the model's; None: the tokenizer's.

        Raises UnsupportedTokenizer.
        """
        # Length limits are the server's business; a file may carry some from its training.
        description = {**description, "truncation": None, "padding": None}
        if vocab_size is not None:
            description = _within(description, vocab_size)
        self.token_bytes: TokenBytes = read_token_bytes(description, vocab_size)
        """The bytes of every token; ``token_bytes.message()`` goes into `GatewayHello`."""
        added_tokens = description.get("added_tokens") or ()
        self.added_tokens: dict[str, int] = {
            token["content"]: token["id"] for token in added_tokens
        }
        """Spelling and id of the tokens that are found in the text before the model sees it."""
        self.control_tokens = tuple(
            token["content"]
            for token in added_tokens
            if token["special"] and len(token["content"]) > 1
        )
        """Spellings of those that are special and long enough to be told from ordinary text."""
        self.bos_token: int | None = None
        self._tokenizer = Tokenizer.from_str(json.dumps(description))
        check_agreement(self._tokenizer, self.token_bytes)
        self._literal = _LiteralTokenizer(self._tokenizer, added_tokens, self.control_tokens)

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Raises UnsupportedTokenizer, FileNotFoundError."""
        config = _read_json(folder / "config.json")
        description = _read_json(folder / "tokenizer.json")
        vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        tokenizer = cls(description, vocab_size)
        named = _optional_json(folder / "tokenizer_config.json").get("bos_token")
        spelling = named.get("content") if isinstance(named, dict) else named
        tokenizer.bos_token = (
            config.get("bos_token_id") if spelling is None else tokenizer.token_of(spelling)
        )
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """The model's: ids are 0..vocab_size-1."""
        return len(self.token_bytes.pieces)

    def token_of(self, spelling: str) -> int | None:
        """Id of the token that is spelled so; None if there is none."""
        token = self._tokenizer.token_to_id(spelling)
        return token if token is not None and token < self.vocab_size else None

    def encode(
        self,
        prompt: PromptText,
        *,
        add_special_tokens: bool,
        truncate_to_last_tokens: int | None = None,
        with_offsets: bool = False,
    ) -> Encoded:
        """Tokenises. By the proto `add_special_tokens` is true for text and false for chat."""
        assert truncate_to_last_tokens is None or truncate_to_last_tokens > 0
        parts = prompt.parts or (prompt.text,)
        spelled, tokenizer = parts, self._tokenizer
        if prompt.parts:
            spelled, tokenizer = self._literal.spell(parts), self._literal.tokenizer
        text = "".join(spelled)
        # A batch of one: only batches release the GIL, and the fast form finds no offsets.
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if prompt.parts:
            ids = self._literal.restore(ids)
        starts: list[int] = []
        ends: list[int] = []
        if with_offsets:
            # What a post-processor adds is no text; control tokens in the text are not flagged.
            added: list[int] = encoding.special_tokens_mask
            tiles = self._tiles(prompt.text, ids, added)
            if tiles is None:
                [encoding] = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
                tiles = _spans(_byte_index(parts, spelled), encoding.offsets, added)
            starts, ends = tiles
        if truncate_to_last_tokens is not None:
            keep = slice(-truncate_to_last_tokens, None)
            ids, starts, ends = ids[keep], starts[keep], ends[keep]
        return Encoded(ids, starts, ends)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids in 0..vocab_size-1; invalid UTF-8 shows as U+FFFD."""
        pieces = self.token_bytes.visible(skip_special_tokens=skip_special_tokens)
        return b"".join([pieces[token] for token in token_ids]).decode(errors="replace")

    def _tiles(
        self, text: str, ids: list[int], added: list[int]
    ) -> tuple[list[int], list[int]] | None:
        """Start and end of each token by its own bytes; None if these are not the text's."""
        pieces = self.token_bytes.pieces
        parts = [
            b"" if is_added else pieces[token] for token, is_added in zip(ids, added, strict=True)
        ]
        joined, data = b"".join(parts), text.encode()
        surplus = len(joined) - len(data)
        # One blank in front is what a SentencePiece normaliser adds.
        if joined != data and not (surplus == 1 and joined == b" " + data):
            return None
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        ends = np.maximum(ends - surplus, 0)
        starts = np.concatenate(([0], ends[:-1])) if parts else ends
        return starts.tolist(), ends.tolist()


class _LiteralTokenizer:
    """The same tokenizer with other spellings for its control tokens.

    What spells a control token in the usual way is ordinary text to it. The other spellings hold a
    number drawn when it is made, so no text can contain them. Everything else, the rules for
    blanks around control tokens included, stays as it is; the model itself is shared.
    """

    def __init__(
        self,
        original: Tokenizer,
        added_tokens: Sequence[Mapping[str, Any]],
        control_tokens: Collection[str],
    ) -> None:
        self.tokenizer = Tokenizer(original.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (value := getattr(original, part)) is not None:
                setattr(self.tokenizer, part, value)
        nonce = secrets.token_hex(16)
        self._other: dict[str, str] = {}
        self._id_of: dict[int, int] = {}
        for added in added_tokens:
            spelling = added["content"]
            flags = {
                flag: added[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized")
            }
            if spelling in control_tokens:
                self._other[spelling] = f"\ufdd0{nonce}.{added['id']}\ufdd1"
                spelling = self._other[spelling]
                flags["normalized"] = False
            self.tokenizer.add_tokens([AddedToken(spelling, special=added["special"], **flags)])
            # With a new spelling it may have got a new id.
            token = self.tokenizer.token_to_id(spelling)
            assert token is not None, spelling
            self._id_of[token] = added["id"]

    def spell(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """`PromptText.parts` as this tokenizer spells them."""
        return tuple(self._other[part] if index % 2 else part for index, part in enumerate(parts))

    def restore(self, ids: list[int]) -> list[int]:
        """The model's ids for this tokenizer's."""
        id_of = self._id_of
        return [id_of.get(token, token) for token in ids]


def _within(description: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Leaves out added tokens that the model has no row for: their spelling is plain text.

    Raises UnsupportedTokenizer if ordinary tokens are beyond the model's vocabulary.
    """
    vocabulary = description["model"]["vocab"]
    last = len(vocabulary) - 1 if isinstance(vocabulary, list) else max(vocabulary.values())
    if last >= vocab_size:
        raise UnsupportedTokenizer(f"it has {last + 1} tokens, the model {vocab_size}")
    added_tokens = description.get("added_tokens") or ()
    kept = [added for added in added_tokens if added["id"] < vocab_size]
    return {**description, "added_tokens": kept}


def _byte_index(parts: tuple[str, ...], spelled: tuple[str, ...]) -> _Positions:
    """For each character boundary of the joined `spelled`: the byte of the joined `parts` there."""
    sizes = [np.zeros(1, dtype=np.int64)]
    for part, other in zip(parts, spelled, strict=True):
        if part == other:
            code = np.frombuffer(part.encode("utf-32-le"), dtype="<u4")
            size = 1 + (code >= 0x80).astype(np.int64) + (code >= 0x800) + (code >= 0x10000)
        else:
            size = np.zeros(len(other), dtype=np.int64)
            size[-1] = len(part.encode())
        sizes.append(size)
    return np.cumsum(np.concatenate(sizes))


def _spans(
    byte_index: _Positions,
    offsets: list[tuple[int, int]],
    added: list[int],
) -> tuple[list[int], list[int]]:
    """Character spans as byte spans; none begins before the one in front of it ends."""
    starts, ends, front = [], [], 0
    for (start, end), is_added in zip(offsets, added, strict=True):
        if is_added:
            start = end = 0
        starts.append(max(front, int(byte_index[start])))
        front = max(starts[-1], int(byte_index[end]))
        ends.append(front)
    return starts, ends


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _optional_json(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}
