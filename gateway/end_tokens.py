"""Which tokens end a sequence of a model: the union of everything its folder says.

Must not know: requests. Called by the servicer at start.
"""

from __future__ import annotations

from pathlib import Path

from gapless.gateway.templates import ChatTemplate
from gapless.gateway.tokenizer import TextTokenizer


def read_end_tokens(
    folder: Path, tokenizer: TextTokenizer, template: ChatTemplate | None
) -> tuple[int, ...]:
    """Ascending, without repeats; may be empty."""
    return ()
