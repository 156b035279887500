"""Validation of prompts: rules 6 to 14 of the table in `validation`.

From `Prompt` to a valid `PromptRequest`. Must not know: tokenizing, templates, sampling.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from typing import Any, Final

from google.protobuf import struct_pb2

from gapless.gateway.failures import Failure
from gapless.gateway.findings import Findings
from gapless.protos import inference_pb2
from gapless.protos.reasons import Reason

MESSAGES_MAX: Final = 4096
TOOLS_MAX: Final = 256
TOOL_CALLS_MAX: Final = 64
TOOL_DESCRIPTION_BYTES_MAX: Final = 4096
JSON_BYTES_MAX: Final = 64 * 1024
CHAT_TEMPLATE_BYTES_MAX: Final = 64 * 1024
NAME_BYTES_MAX: Final = 64

_ROLE = re.compile(r"[a-z][a-z_]{0,31}")
_FUNCTION = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRules:
    """What the rules depend on."""

    vocab_size: int
    context_length: int
    prompt_bytes_max: int
    has_chat_template: bool
    chat_template_allowed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRequest:
    """A valid prompt. Exactly one of `text`, `token_ids` and `chat` is set."""

    text: str | None
    token_ids: tuple[int, ...] | None
    chat: inference_pb2.ChatPrompt | None
    add_special_tokens: bool
    truncate_to_last_tokens: int | None


def check_prompt(
    prompt: inference_pb2.Prompt, rules: PromptRules, findings: Findings
) -> PromptRequest | None:
    """The valid prompt; None if something is wrong with its form (see `findings`)."""
    form = prompt.WhichOneof("input")
    if form is None:
        findings.invalid("prompt.input", "one of text, token_ids and chat must be set")
        return None
    token_ids: tuple[int, ...] | None = None
    if form == "text":
        findings.check_size("prompt.text", prompt.text, rules.prompt_bytes_max, 1)
    elif form == "token_ids":
        token_ids = tuple(prompt.token_ids.ids)
        if token_ids:
            check_token_ids("prompt.token_ids.ids", token_ids, rules.vocab_size, findings)
        else:
            findings.invalid("prompt.token_ids.ids", "must not be empty")
    else:
        _check_chat(prompt.chat, rules, findings)
    if token_ids is not None and prompt.HasField("add_special_tokens"):
        findings.invalid("prompt.add_special_tokens", "must be unset with token_ids")
    truncate = None
    if prompt.HasField("truncate_to_last_tokens"):
        truncate = prompt.truncate_to_last_tokens
        findings.check_integer("prompt.truncate_to_last_tokens", truncate, 1, rules.context_length)
    return PromptRequest(
        text=prompt.text if form == "text" else None,
        token_ids=token_ids,
        chat=prompt.chat if form == "chat" else None,
        add_special_tokens=(
            prompt.add_special_tokens if prompt.HasField("add_special_tokens") else form == "text"
        ),
        truncate_to_last_tokens=truncate,
    )


def check_token_ids(
    field: str, token_ids: Iterable[int], vocab_size: int, findings: Findings
) -> None:
    """A violation ``field[i]`` for every id that the model does not have."""
    ids = tuple(token_ids)
    if not ids or max(ids) < vocab_size:
        return
    for index, token in enumerate(ids):
        if token >= vocab_size:
            findings.invalid(f"{field}[{index}]", f"is {token}, must be below {vocab_size}")


def _check_chat(chat: inference_pb2.ChatPrompt, rules: PromptRules, findings: Findings) -> None:
    field = "prompt.chat"
    findings.check_integer(f"{field}.messages", len(chat.messages), 1, MESSAGES_MAX)
    call_ids: set[str] = set()
    for index, message in enumerate(chat.messages[:MESSAGES_MAX]):
        _check_message(f"{field}.messages[{index}]", message, call_ids, findings)
    if len(chat.tools) > TOOLS_MAX:
        findings.invalid(f"{field}.tools", f"has {len(chat.tools)} items, at most {TOOLS_MAX}")
    names: set[str] = set()
    for index, tool in enumerate(chat.tools[:TOOLS_MAX]):
        _check_tool(f"{field}.tools[{index}]", tool, names, findings)
    if not _all_finite(chat.template_kwargs):
        findings.invalid(f"{field}.template_kwargs", "holds a number that is not finite")
    if chat.continue_final_message:
        if chat.HasField("add_generation_prompt") and chat.add_generation_prompt:
            findings.invalid(
                f"{field}.continue_final_message",
                "cannot be true together with add_generation_prompt",
            )
        if chat.messages and chat.messages[-1].role != "assistant":
            findings.invalid(
                f"{field}.continue_final_message", "needs a last message of role assistant"
            )
    if chat.HasField("chat_template"):
        if rules.chat_template_allowed:
            findings.check_size(
                f"{field}.chat_template", chat.chat_template, CHAT_TEMPLATE_BYTES_MAX, 1
            )
        else:
            findings.refuse(
                Failure(
                    Reason.PERMISSION_DENIED,
                    f"{field}.chat_template is not allowed here",
                    metadata={"field": f"{field}.chat_template"},
                )
            )
    if not rules.has_chat_template:
        findings.invalid(field, "the model has no chat template", Reason.TEMPLATE_ERROR)


def _check_message(
    field: str, message: inference_pb2.ChatMessage, call_ids: set[str], findings: Findings
) -> None:
    if not _ROLE.fullmatch(message.role):
        findings.invalid(f"{field}.role", "must match [a-z][a-z_]{0,31}")
    if not message.content and not message.tool_calls:
        findings.invalid(f"{field}.content", "may be empty only beside tool_calls")
    findings.check_size(f"{field}.name", message.name, NAME_BYTES_MAX)
    findings.check_size(f"{field}.tool_call_id", message.tool_call_id, NAME_BYTES_MAX)
    if len(message.tool_calls) > TOOL_CALLS_MAX:
        findings.invalid(
            f"{field}.tool_calls",
            f"has {len(message.tool_calls)} items, at most {TOOL_CALLS_MAX}",
        )
    for index, call in enumerate(message.tool_calls[:TOOL_CALLS_MAX]):
        path = f"{field}.tool_calls[{index}]"
        if findings.check_size(f"{path}.id", call.id, NAME_BYTES_MAX, 1) and call.id in call_ids:
            findings.invalid(f"{path}.id", "is not unique within the conversation")
        call_ids.add(call.id)
        if not _FUNCTION.fullmatch(call.name):
            findings.invalid(f"{path}.name", "must match [A-Za-z0-9_.-]{1,64}")
        _check_json_object(f"{path}.arguments_json", call.arguments_json, None, findings)


def _check_tool(
    field: str, tool: inference_pb2.ToolDefinition, names: set[str], findings: Findings
) -> None:
    if not _FUNCTION.fullmatch(tool.name):
        findings.invalid(f"{field}.name", "must match [A-Za-z0-9_.-]{1,64}")
    elif tool.name in names:
        findings.invalid(f"{field}.name", "is not unique")
    names.add(tool.name)
    findings.check_size(f"{field}.description", tool.description, TOOL_DESCRIPTION_BYTES_MAX)
    _check_json_object(f"{field}.parameters_json", tool.parameters_json, JSON_BYTES_MAX, findings)


def _check_json_object(field: str, text: str, bytes_max: int | None, findings: Findings) -> None:
    """Empty text stands for an empty object."""
    if not text or (bytes_max is not None and not findings.check_size(field, text, bytes_max)):
        return
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        findings.invalid(field, "is no valid JSON")
        return
    if not isinstance(value, dict):
        findings.invalid(field, "must be a JSON object")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _all_finite(struct: struct_pb2.Struct) -> bool:
    """Whether every number in it is finite. Its depth is limited by protobuf's parser."""
    return all(_is_finite(value) for value in struct.fields.values())


def _is_finite(value: struct_pb2.Value) -> bool:
    match value.WhichOneof("kind"):
        case "number_value":
            return math.isfinite(value.number_value)
        case "struct_value":
            return _all_finite(value.struct_value)
        case "list_value":
            return all(_is_finite(inner) for inner in value.list_value.values)
        case _:
            return True
