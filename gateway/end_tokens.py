"""Which tokens end a sequence of a model: the union of everything its folder says.

No single source is right for every model: configurations name the end of a document where a chat
ends by the end of a turn, conversions name a wrong token. To stop at a token too many is
harmless, as a model writes none of them in mid-sentence; to miss one is not.

Must not know: requests. Called by `model` at start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gapless.gateway.templates import ChatTemplate, TemplateFailed
from gapless.gateway.tokenizer import TextTokenizer
from gapless.protos.inference_pb2 import ChatMessage, ChatPrompt

_MARKER: Final = "gaplessmarker"
"""An assistant's whole turn, found again in the rendered text."""


def read_end_tokens(
    folder: Path, tokenizer: TextTokenizer, template: ChatTemplate | None
) -> tuple[int, ...]:
    """Ids in 0..vocab_size-1, ascending, without repeats; may be empty."""
    found = {
        *_configured(_read_json(folder / "generation_config.json")),
        *_configured(_read_json(folder / "config.json")),
        *_named(_read_json(folder / "tokenizer_config.json"), tokenizer),
    }
    if template is not None and (token := turn_end(tokenizer, template)) is not None:
        found.add(token)
    return tuple(sorted(token for token in found if 0 <= token < tokenizer.vocab_size))


def turn_end(tokenizer: TextTokenizer, template: ChatTemplate) -> int | None:
    """The token that the template writes right behind an assistant's turn; None if it has none."""
    turns = [
        ChatMessage(role="user", content="Hello"),
        ChatMessage(role="assistant", content=_MARKER),
        ChatMessage(role="user", content="Bye"),
    ]
    # A template may close only turns that another follows, or refuse a chat that ends with a user.
    for messages in (turns, turns[:2]):
        chat = ChatPrompt(messages=messages, add_generation_prompt=False)
        try:
            text = template.render(chat).text
        except TemplateFailed:
            continue
        _, marker, behind = text.partition(_MARKER)
        if not marker:
            continue
        behind = behind.lstrip()
        matching = [token for token in tokenizer.added_tokens if behind.startswith(token)]
        if matching:
            return tokenizer.added_tokens[max(matching, key=len)]
    return None


def _configured(config: Mapping[str, Any]) -> Iterator[int]:
    """`eos_token_id`, one or a list; also that of the text part of a model of several parts."""
    ids = config.get("eos_token_id")
    if isinstance(ids, int):
        yield ids
    elif isinstance(ids, list):
        yield from ids
    part = config.get("text_config")
    if isinstance(part, dict):
        yield from _configured(part)


def _named(config: Mapping[str, Any], tokenizer: TextTokenizer) -> Iterator[int]:
    """`eos_token` by its spelling."""
    entry = config.get("eos_token")
    spelling = entry.get("content") if isinstance(entry, dict) else entry
    if isinstance(spelling, str) and (token := tokenizer.token_of(spelling)) is not None:
        yield token


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    if not path.is_file():
        return {}
    return dict(json.loads(path.read_text(encoding="utf-8")))
