"""Keyword options of `Client.generate` and `Client.tokenize` → protobuf messages.

Owns the names of the options and where each lies in the message. Checks only what Python must know
to build the message (names, types); values are the server's to judge. An option that is not given
stays unset, so that the model's default holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, TypedDict

from google.protobuf.message import Message

from gapless.protos import inference_pb2


class PromptOptions(TypedDict, total=False):
    """How a prompt becomes tokens. The last four need `messages`."""

    add_special_tokens: bool
    truncate_to_last_tokens: int
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str
    template_kwargs: Mapping[str, Any]


class GenerateOptions(PromptOptions, total=False):
    """Options of `Client.generate`; meanings, ranges and defaults are in ``inference.proto``."""

    request_id: str
    model: str
    adapter: str
    labels: Mapping[str, str]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    candidate_count: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    json_schema: str
    json_object: bool
    regex: str
    ebnf_grammar: str
    max_new_tokens: int
    min_new_tokens: int
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_in_text: bool
    ignore_eos: bool
    soft_time_limit_s: float
    return_text: bool
    return_token_ids: bool
    return_prompt_token_ids: bool
    skip_special_tokens: bool
    flush_interval_ms: int
    priority: int
    queue_timeout_s: float
    session_id: str
    cache_salt: str
    bypass_prefix_cache: bool


PROMPT_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "add_special_tokens": "add_special_tokens",
        "truncate_to_last_tokens": "truncate_to_last_tokens",
        "add_generation_prompt": "chat.add_generation_prompt",
        "continue_final_message": "chat.continue_final_message",
        "chat_template": "chat.chat_template",
        "template_kwargs": "chat.template_kwargs",
    }
)
"""Option → path within `Prompt`."""

_RENAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "soft_time_limit_s": "stopping.soft_time_limit",
        "queue_timeout_s": "scheduling.queue_timeout",
        "return_text": "output.text",
        "return_token_ids": "output.token_ids",
        "return_prompt_token_ids": "output.prompt_token_ids",
    }
)


def _generate_fields() -> Mapping[str, str]:
    request = inference_pb2.GenerateRequest.DESCRIPTOR
    parts = {
        "sampling": inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name,
        "stopping": inference_pb2.StoppingParams.DESCRIPTOR.fields_by_name,
        "output": inference_pb2.OutputOptions.DESCRIPTOR.fields_by_name,
        "scheduling": inference_pb2.SchedulingParams.DESCRIPTOR.fields_by_name,
    }
    fields = {option: f"prompt.{path}" for option, path in PROMPT_FIELDS.items()}
    for option in GenerateOptions.__annotations__.keys() - fields.keys():
        if option in _RENAMED:
            fields[option] = _RENAMED[option]
        elif option in request.fields_by_name:
            fields[option] = option
        else:
            (part,) = (part for part, names in parts.items() if option in names)
            fields[option] = f"{part}.{option}"
    return MappingProxyType(fields)


GENERATE_FIELDS: Final = _generate_fields()
"""Option → path within `GenerateRequest`."""


def prompt_message(
    text: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    token_ids: Sequence[int] | None,
) -> inference_pb2.Prompt:
    """The prompt in the one form that was given.

    Raises:
        TypeError: none or several forms were given.
    """
    if sum(form is not None for form in (text, messages, token_ids)) != 1:
        raise TypeError("give exactly one of: prompt text, messages, token_ids")
    if text is not None:
        return inference_pb2.Prompt(text=text)
    if token_ids is not None:
        return inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=token_ids))
    assert messages is not None
    chat = inference_pb2.ChatPrompt(
        messages=[inference_pb2.ChatMessage(**message) for message in messages]
    )
    return inference_pb2.Prompt(chat=chat)


def set_options(message: Message, fields: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Sets each option that is not None at its path.

    Raises:
        TypeError: an unknown option, a value of the wrong type, or a chat option without messages.
        ValueError: a number that the field cannot hold.
    """
    for option, value in options.items():
        if option not in fields:
            raise TypeError(f"unknown option {option!r}")
        if value is None:
            continue
        *parents, name = fields[option].split(".")
        target: Any = message
        for parent in parents:
            if parent == "chat" and not target.HasField("chat"):
                raise TypeError(f"option {option!r} needs messages")
            target = getattr(target, parent)
        _set(target, name, value)


def _set(target: Any, name: str, value: Any) -> None:
    field = target.DESCRIPTOR.fields_by_name[name]
    current = getattr(target, name)
    if field.message_type is None:
        if hasattr(current, "extend"):
            current.extend(value)
        else:
            setattr(target, name, value)
    elif field.message_type.full_name == "google.protobuf.Duration":
        current.FromTimedelta(timedelta(seconds=value))
    else:
        current.update(value)


def generate_request(
    text: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> inference_pb2.GenerateRequest:
    """The whole request; raises as `prompt_message` and `set_options`."""
    request = inference_pb2.GenerateRequest(prompt=prompt_message(text, messages, token_ids))
    set_options(request, GENERATE_FIELDS, options)
    return request
