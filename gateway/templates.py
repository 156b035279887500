"""Chat templates: from a `ChatPrompt` to the text that is tokenised.

Owns the template of the model folder and how messages, tools and extra variables reach it.
Rendering is transformers' own (`render_jinja_template`: no torch, sandboxed).

Must not know: tokens ids, requests, gRPC. Called by the servicer in a thread, and by `end_tokens`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gapless.protos import inference_pb2


class TemplateFailed(Exception):
    """The chat cannot be rendered; `str()` says why, fit for the caller's eyes."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as text, ready to be tokenised."""

    text: str
    """What the model reads, as text; `TokenizeResponse.rendered_text`."""
    marked: str | None = None
    """The text with spelled-out control tokens inside message contents marked as plain text; None
    where there are none, so `text` is tokenised as it stands."""


class ChatTemplate:
    """The chat template of a model folder. Immutable; threads may share it."""

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """None if the model has no chat template."""
        raise TemplateFailed

    def render(self, chat: inference_pb2.ChatPrompt) -> PromptText:
        """Renders a validated chat (API.md section 3, rules 9 to 12; JSON fields parse).

        Honours tools, chat_template, template_kwargs, add_generation_prompt and
        continue_final_message with the defaults of the proto. Raises TemplateFailed: the template
        raises, does not mention the tools it was given, or drops the message to be continued.
        """
        raise TemplateFailed
