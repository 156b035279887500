"""The commands that make one request each: generate, tokenize, detokenize, models, health, stats.

Owns what they print. Each takes the parsed command line and returns the exit code; failures leave
as `GaplessError`, for `__main__` to explain. Called by `__main__` when it is known that gRPC is
needed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gapless.client import gauges, terminal
from gapless.client.client import Client
from gapless.client.errors import GaplessError
from gapless.client.options import GENERATE_OPTIONS, token_ids
from gapless.client.stream import Generation
from gapless.client.values import Completed, Delta, HealthStatus, ModelInfo, ServerStats


def connect(arguments: argparse.Namespace) -> Client:
    """A client for the server that the command line names."""
    return Client(arguments.server, timeout_s=arguments.timeout_s)


def generate_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by the client's names."""
    return {name: getattr(arguments, name, None) for name in GENERATE_OPTIONS}


def read_text(argument: str | None) -> str:
    """An argument, or stdin if it is missing or ``-``. Raises ValueError: it is not UTF-8."""
    if argument is not None and argument != "-":
        text = argument
    else:
        if sys.stdin.isatty():
            terminal.note("reading from the terminal: end with Ctrl-D")
        text = sys.stdin.read()
    # Python keeps a byte that it cannot decode as a lone surrogate, which no request can carry.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the text is not valid UTF-8")
    return text


def messages_of(text: str, system: str | None) -> list[dict[str, str]]:
    """A conversation of one message, with the system's before it if there is one."""
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


class Stopwatch:
    """Times one stream as the person at the terminal sees it."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._first_token_s: float | None = None

    def on_delta(self, delta: Delta) -> None:
        if self._first_token_s is None and delta.token_count > 0:
            self._first_token_s = time.monotonic() - self._begun_s

    def closing_line(self, completed: Completed) -> str:
        total_s = time.monotonic() - self._begun_s
        return terminal.closing_line(completed, self._first_token_s, total_s)


async def stream_to_terminal(stream: Generation) -> str:
    """Writes the text as it comes, then the closing line on stderr; returns the text."""
    watch = Stopwatch()
    texts: list[str] = []
    try:
        async for delta in stream:
            watch.on_delta(delta)
            texts.append(delta.text)
            terminal.write(delta.text)
    finally:
        # A line that was begun is ended, whatever happened.
        if texts and not "".join(texts).endswith("\n"):
            terminal.write("\n")
    if stream.completed is not None:
        terminal.note(watch.closing_line(stream.completed))
    return "".join(texts)


async def generate(arguments: argparse.Namespace) -> int:
    """`gapless generate`."""
    options = generate_options(arguments)
    if arguments.token_ids is not None:
        if arguments.prompt is not None or arguments.chat or arguments.system is not None:
            raise ValueError("--token-ids is the whole prompt: give neither text nor --chat")
        prompt: dict[str, Any] = {"token_ids": arguments.token_ids}
    elif arguments.chat or arguments.system is not None:
        prompt = {"messages": messages_of(read_text(arguments.prompt), arguments.system)}
    else:
        prompt = {"prompt": read_text(arguments.prompt)}
    async with connect(arguments) as client, client.generate(**prompt, **options) as stream:
        if arguments.json:
            await _stream_as_json(stream)
        else:
            await stream_to_terminal(stream)
    return terminal.OK


async def _stream_as_json(stream: Generation) -> None:
    """One object a line: started, each delta, completed, or error."""
    try:
        async for delta in _with_started(stream):
            terminal.write(_json_line("delta", _delta_as_json(delta)))
    except GaplessError as error:
        terminal.write(_json_line("error", error_as_json(error)))
        raise
    if stream.completed is not None:
        terminal.write(_json_line("completed", _completed_as_json(stream.completed)))


async def _with_started(stream: Generation) -> AsyncIterator[Delta]:
    first = True
    async for delta in stream:
        if first and stream.started is not None:
            started = stream.started
            fields = {
                "request_id": started.request_id,
                "model": started.model,
                "prompt_tokens": started.prompt_tokens,
            }
            terminal.write(_json_line("started", fields))
        first = False
        yield delta


def _json_line(event: str, fields: dict[str, Any]) -> str:
    return json.dumps({"event": event, **fields}, ensure_ascii=False) + "\n"


def _delta_as_json(delta: Delta) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "candidate_index": delta.candidate_index,
        "first_token_index": delta.first_token_index,
        "token_count": delta.token_count,
        "text": delta.text,
    }
    if delta.token_ids:
        fields["token_ids"] = delta.token_ids
    if delta.finish is not None:
        fields["finish"] = {
            "reason": delta.finish.reason.value,
            "stop_token_id": delta.finish.stop_token_id,
            "stop_string": delta.finish.stop_string,
        }
    return fields


def _completed_as_json(completed: Completed) -> dict[str, Any]:
    usage, timing = completed.usage, completed.timing
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "queue_s": timing.queue_s,
        "prefill_s": timing.prefill_s,
        "time_to_first_token_s": timing.time_to_first_token_s,
        "decode_s": timing.decode_s,
        "total_s": timing.total_s,
        "preemption_count": timing.preemption_count,
        "seed": completed.seed,
    }


def error_as_json(error: GaplessError) -> dict[str, Any]:
    """An error's parts."""
    return {
        "code": error.code,
        "reason": error.reason,
        "message": str(error),
        "metadata": dict(error.metadata),
        "violations": [{"field": v.field, "description": v.description} for v in error.violations],
        "retry_after_s": error.retry_after_s,
    }


async def tokenize(arguments: argparse.Namespace) -> int:
    """`gapless tokenize`: ids on one line."""
    text = read_text(arguments.text)
    prompt: dict[str, Any] = (
        {"messages": messages_of(text, None)} if arguments.chat else {"prompt": text}
    )
    async with connect(arguments) as client:
        tokens = await client.tokenize(**prompt, model=arguments.model or "")
    if arguments.json:
        fields = {
            "token_count": tokens.token_count,
            "token_ids": tokens.token_ids,
            "rendered_text": tokens.rendered_text,
        }
        terminal.write(json.dumps(fields, ensure_ascii=False) + "\n")
    elif arguments.count:
        terminal.write(f"{tokens.token_count}\n")
    else:
        terminal.write(" ".join(map(str, tokens.token_ids)) + "\n")
    return terminal.OK


async def detokenize(arguments: argparse.Namespace) -> int:
    """`gapless detokenize`: the text, with no line end added."""
    text = " ".join(arguments.ids) if arguments.ids else read_text(None)
    try:
        ids = token_ids(text)
    except argparse.ArgumentTypeError as error:
        terminal.note(f"gapless detokenize: {error}")
        return terminal.USAGE
    async with connect(arguments) as client:
        shown = await client.detokenize(
            ids, model=arguments.model or "", skip_special_tokens=not arguments.keep_special
        )
    terminal.write(shown)
    if sys.stdout.isatty():
        terminal.write("\n")
    return terminal.OK


async def models(arguments: argparse.Namespace) -> int:
    """`gapless models`."""
    async with connect(arguments) as client:
        found = await client.models()
    for model in found:
        terminal.write(_model_as_json(model) if arguments.json else _model_as_text(model))
    return terminal.OK


def _model_as_text(model: ModelInfo) -> str:
    chat = "chat" if model.has_chat_template else "no chat template"
    return (
        f"{model.name}  {model.architecture}  context {model.context_length} tokens"
        f"  vocabulary {model.vocab_size}  {chat}\n"
    )


def _model_as_json(model: ModelInfo) -> str:
    fields = {
        "name": model.name,
        "aliases": model.aliases,
        "architecture": model.architecture,
        "revision": model.revision,
        "context_length": model.context_length,
        "max_prompt_tokens": model.max_prompt_tokens,
        "vocab_size": model.vocab_size,
        "bos_token_id": model.bos_token_id,
        "eos_token_ids": model.eos_token_ids,
        "has_chat_template": model.has_chat_template,
        "default_sampling": dict(model.default_sampling),
        "default_max_new_tokens": model.default_max_new_tokens,
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


async def health(arguments: argparse.Namespace) -> int:
    """`gapless health`: 0 only if SERVING."""
    async with connect(arguments) as client:
        if not arguments.watch:
            status = await client.health()
            terminal.write(f"{status.name}\n")
            return terminal.OK if status is HealthStatus.SERVING else terminal.FAILED
        async with _closing(client.watch_health()) as changes:
            async for status in changes:
                terminal.write(f"{status.name}\n")
    return terminal.FAILED


async def stats(arguments: argparse.Namespace) -> int:
    """`gapless stats`: since start, and with --watch since the snapshot before."""
    shown = gauges.as_json if arguments.json else gauges.as_text
    address, timeout_s = arguments.server, arguments.timeout_s
    async with Client(address, admin_address=address, timeout_s=timeout_s) as client:
        if not arguments.watch:
            terminal.write(shown(await client.stats(), None))
            return terminal.OK
        before: ServerStats | None = None
        async with _closing(client.watch_stats()) as snapshots:
            async for snapshot in snapshots:
                terminal.write(shown(snapshot, before))
                before = snapshot
    return terminal.OK


@asynccontextmanager
async def _closing(changes: Any) -> AsyncIterator[AsyncIterator[Any]]:
    try:
        yield changes
    finally:
        await changes.aclose()
