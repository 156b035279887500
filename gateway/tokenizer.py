"""Text to token ids and back.

Owns the model folder's tokenizer. Everything here is thread-safe, and long texts are tokenised
with the GIL released, so the servicer runs it in a thread pool.

Must not know: templates (it gets a `PromptText`), requests, gRPC. Called by the servicer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from gapless.gateway.templates import PromptText
from gapless.gateway.vocabulary import TokenBytes, UnsupportedTokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A tokenised prompt."""

    token_ids: list[int]
    start_bytes: list[int]
    """Where each token starts in `PromptText.text`, in UTF-8 bytes; empty if not asked for."""
    end_bytes: list[int]
    """Where it ends, exclusive."""


class TextTokenizer:
    """The tokenizer of a model folder."""

    token_bytes: TokenBytes
    """The bytes of every token; `token_bytes.message()` goes into `GatewayHello`."""
    vocab_size: int
    """The model's: ids are 0..vocab_size-1."""
    bos_token: int | None

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Raises UnsupportedTokenizer, FileNotFoundError."""
        raise UnsupportedTokenizer

    def encode(
        self,
        prompt: PromptText,
        *,
        add_special_tokens: bool,
        truncate_to_last_tokens: int | None = None,
        with_offsets: bool = False,
    ) -> Encoded:
        """Tokenises; `add_special_tokens` defaults to true for text and false for chat (proto)."""
        raise UnsupportedTokenizer

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids in 0..vocab_size-1; invalid UTF-8 shows as U+FFFD."""
        raise UnsupportedTokenizer
