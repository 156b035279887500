"""Chat templates: from a `ChatPrompt` to the text that is tokenised.

Owns the template of the model folder, and how messages, tools and extra variables reach it.
Rendering itself is transformers' `render_jinja_template`: sandboxed, without torch, and the one
place that follows what published templates expect.

Text inside a message that spells a control token is no control token: a user who writes the
model's turn marks has written text, not a turn. Such spellings are broken up with a noncharacter
before the template sees them, which tells them afterwards from those that the template wrote.

Must not know: token ids, requests, gRPC. Called by `preparation` in a thread, and by `end_tokens`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import jinja2
from google.protobuf import struct_pb2
from transformers.utils.chat_template_utils import render_jinja_template

from gapless.protos import inference_pb2

NONCHARACTERS: Final = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that Unicode keeps for a program's own use; one that the chat lacks is the mark."""
RESERVED_VARIABLES: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
        "tools",
    }
)
"""Names that `template_kwargs` cannot set: the request has fields for them."""


class TemplateFailed(Exception):  # noqa: N818 - the families of failures are named by what happened
    """The chat cannot be rendered; `str()` says why, fit for the caller's eyes."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as text, ready to be tokenised."""

    text: str
    """What the model reads, as text: `TokenizeResponse.rendered_text`."""
    parts: tuple[str, ...] = ()
    """`text` cut at its control tokens: plain text at even places, control tokens at odd ones.
    Empty if every spelling of a control token in `text` is one."""


class ChatTemplate:
    """The chat template of a model folder. Immutable; threads may share it."""

    def __init__(
        self,
        templates: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        control_tokens: Iterable[str] = (),
    ) -> None:
        """`templates` by name: "default", and perhaps "tool_use" for chats with tools.

        `variables` are the model's own, such as bos_token; `control_tokens` the spellings of its
        special tokens.
        """
        assert "default" in templates, tuple(templates)
        self._templates = dict(templates)
        self._variables = dict(variables or {})
        spellings = tuple(control_tokens)
        assert all(len(spelling) > 1 for spelling in spellings), "no room for a mark inside"
        any_of = _any_of(spellings)
        self._control = re.compile(f"({any_of})")
        # Also where spellings overlap: the first character of each is followed by a mark.
        self._control_start = re.compile(rf"(?={any_of})([\s\S])")

    @classmethod
    def load(cls, folder: Path, control_tokens: Iterable[str]) -> ChatTemplate | None:
        """None if the model has no chat template.

        `control_tokens` is `TextTokenizer.control_tokens`.
        """
        config = _read_json(folder / "tokenizer_config.json")
        templates = _templates_of(folder, config)
        if "default" not in templates:
            return None
        return cls(templates, _special_spellings(config), control_tokens)

    def render(self, chat: inference_pb2.ChatPrompt) -> PromptText:
        """Renders a validated chat (API.md section 3, rules 9 to 12; its JSON fields parse).

        Honours tools, chat_template, template_kwargs, add_generation_prompt and
        continue_final_message with the defaults of the proto. Raises TemplateFailed: the template
        raises, makes nothing of the tools or tool calls it was given, or drops the message that
        is to be continued.
        """
        try:
            return self._render(chat)
        except RecursionError as error:
            raise TemplateFailed("the chat is nested too deeply") from error

    def _render(self, chat: inference_pb2.ChatPrompt) -> PromptText:
        template = self._template_for(chat)
        messages = [_message(message) for message in chat.messages]
        tools = [_tool(tool) for tool in chat.tools]
        extra = {name: _plain(value) for name, value in chat.template_kwargs.fields.items()}
        if reserved := sorted(RESERVED_VARIABLES & extra.keys()):
            raise TemplateFailed(f"template_kwargs cannot set {', '.join(reserved)}")
        options = {
            "continue_final_message": chat.continue_final_message,
            "add_generation_prompt": (
                chat.add_generation_prompt
                if chat.HasField("add_generation_prompt")
                else not chat.continue_final_message
            ),
        }
        given = (messages, tools, extra)
        mark = self._mark_for(given, template)
        if mark is not None:
            messages, tools, extra = self._marked(given, mark)
        variables = {**self._variables, **extra, **options}
        text = _render(template, messages, tools, variables)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # JSON in tools and calls can spell half a character; protobuf's strings cannot.
            raise TemplateFailed("the chat holds a surrogate without its other half") from error
        self._check_effects(text, template, messages, tools, variables)
        if mark is None:
            return PromptText(text)
        text = text.replace(_escape(mark), mark)
        parts = tuple(part.replace(mark, "") for part in self._control.split(text))
        return PromptText("".join(parts), parts)

    def _template_for(self, chat: inference_pb2.ChatPrompt) -> str:
        if chat.HasField("chat_template"):
            return chat.chat_template
        if chat.tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates["default"]

    def _mark_for(self, given: Any, template: str) -> str | None:
        """The noncharacter that marks; None if nothing in `given` spells a control token."""
        if not any(map(self._control.search, _strings(given))):
            return None
        taken = json.dumps(given, ensure_ascii=False) + template
        for mark in NONCHARACTERS:
            if mark not in taken and _escape(mark) not in taken:
                return mark
        raise TemplateFailed("the messages contain every noncharacter from U+FDD0 to U+FDEF")

    def _marked(self, value: Any, mark: str) -> Any:
        """`value` with a mark inside every spelling of a control token, keys included."""
        match value:
            case str():
                return self._control_start.sub(rf"\1{mark}", value)
            case dict():
                return {self._marked(k, mark): self._marked(v, mark) for k, v in value.items()}
            case list() | tuple():
                return [self._marked(item, mark) for item in value]
        return value

    def _check_effects(
        self,
        text: str,
        template: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        variables: dict[str, Any],
    ) -> None:
        """What a caller sends must reach the model: the text must differ without it."""
        if tools and _render_or_none(template, messages, [], variables) == text:
            raise TemplateFailed("the chat template makes no use of tools")
        if any("tool_calls" in message for message in messages):
            bare = [
                {key: value for key, value in message.items() if key != "tool_calls"}
                for message in messages
            ]
            if _render_or_none(template, bare, tools, variables) == text:
                raise TemplateFailed("the chat template makes no use of tool_calls")


def _render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
) -> str:
    """One rendering. Raises TemplateFailed, whatever the template does."""
    try:
        # Typed as returning a string; it returns a list of them and their masks.
        rendered, _ = cast(Any, render_jinja_template)(
            conversations=[messages], tools=tools or None, chat_template=template, **variables
        )
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFailed(
            f"line {error.lineno} of the chat template: {error.message}"
        ) from error
    except jinja2.TemplateError as error:
        raise TemplateFailed(str(error) or type(error).__name__) from error
    except Exception as error:
        # A template is a program of somebody else's: it may fail in any way a program can.
        if variables["continue_final_message"] and isinstance(error, ValueError):
            reason = "the chat template does not keep the last message, so it cannot be continued"
            raise TemplateFailed(reason) from error
        raise TemplateFailed(f"the chat template fails: {error}") from error
    return str(rendered[0])


def _render_or_none(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    variables: dict[str, Any],
) -> str | None:
    """None where rendering fails, which no text equals."""
    try:
        return _render(template, messages, tools, variables)
    except TemplateFailed:
        return None


# ------------------------------------------------------------------ from protobuf to plain data


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    """A message as templates know it. Unset fields are absent, as templates ask for them so."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    for field in ("name", "tool_call_id", "reasoning_content"):
        if message.HasField(field):
            plain[field] = getattr(message, field)
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.loads(call.arguments_json or "{}"),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _tool(tool: inference_pb2.ToolDefinition) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": json.loads(tool.parameters_json or "{}"),
        },
    }


def _plain(value: struct_pb2.Value) -> Any:
    """As JSON would give it: a whole number is an int, though protobuf has only floats."""
    match value.WhichOneof("kind"):
        case "struct_value":
            return {name: _plain(item) for name, item in value.struct_value.fields.items()}
        case "list_value":
            return [_plain(item) for item in value.list_value.values]
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
    return None


def _strings(value: Any) -> Iterable[str]:
    """Every string in plain data, keys included."""
    match value:
        case str():
            yield value
        case dict():
            for key, item in value.items():
                yield key
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)


def _any_of(spellings: Iterable[str]) -> str:
    """A regular expression that matches the longest of these at a place, as a tokenizer does.

    It is a tree of common beginnings, so that its cost does not grow with the number of spellings:
    some models have thousands, and a hostile text would begin each of them everywhere.
    """
    tree: dict[str, Any] = {}
    for spelling in spellings:
        node = tree
        for character in spelling:
            node = node.setdefault(character, {})
        node[""] = {}

    def expression(node: dict[str, Any]) -> str:
        literal = ""
        while len(node) == 1 and "" not in node:
            [(character, node)] = node.items()
            literal += re.escape(character)
        branches = [re.escape(key) + expression(child) for key, child in node.items() if key]
        if not branches:
            return literal
        return f"{literal}(?:{'|'.join(branches)}){'?' if '' in node else ''}"

    return expression(tree) if tree else r"(?!)"


def _escape(mark: str) -> str:
    """How a template's JSON filter or Python's repr may have written the mark."""
    return f"\\u{ord(mark):04x}"


# ------------------------------------------------------------------ from the model folder


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    if not path.is_file():
        return {}
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _templates_of(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name. A template file counts more than the tokenizer's configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    entry = config.get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    return {named["name"]: named["template"] for named in entry or ()}


def _special_spellings(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, which templates read as variables."""
    spellings = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            spellings[name] = content
    return spellings
