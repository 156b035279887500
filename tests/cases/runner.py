"""Performs the sends of a recorded case over gRPC and judges the results.

Owns the order of the sends and what the assertions may name. Called by the test of the cases.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from gapless.protos import admin_pb2, inference_pb2
from tests.cases.case_file import Case, CaseFile, Send, with_context
from tests.processes.calls import (
    CALL_LIMIT_S,
    Failure,
    Gateway,
    Reply,
    at_rest,
    collect,
    generate,
    request_of,
    statistics_when,
)

METHODS: dict[str, MethodDescriptor] = {
    **inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name,
    **{
        f"Admin.{name}": method
        for name, method in admin_pb2.DESCRIPTOR.services_by_name[
            "AdminService"
        ].methods_by_name.items()
    },
}
LOGPROB_FIELDS = ("token_logprobs", "ranks", "top_token_ids", "top_logprobs")
REFUSALS = {
    ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE"),
    ("INVALID_ARGUMENT", "INVALID_CONSTRAINT"),
    ("INVALID_ARGUMENT", "INVALID_FIELD"),
}
RESULT_SHOWN_MAX = 200
"""Characters of a result in the report of a failed case."""
ASSERTION_NAMES: dict[str, object] = {
    function.__name__: function
    for function in (
        *(all, any, len, set, sorted, sum, abs, min, max, range, zip, enumerate, next),
        *(str, bytes, bool, list, tuple, isinstance),
        *(json.loads, math.isnan, math.isfinite, re.fullmatch),
    )
}


class Result:
    """What one send brought, as attributes that the assertions read.

    Always ``code`` (status name), ``reason`` and ``metadata`` (ErrorInfo), ``fields`` (BadRequest)
    and ``ms``. For Generate also ``started``, ``deltas``, ``text``, ``token_ids``, ``finish``
    (without its prefix), ``matched``, ``usage``, ``seed``, ``prompt_token_ids``, and of the
    log-probabilities ``top_count`` and all slices joined. For other calls the response's fields.
    Messages are mappings by proto field name.
    """

    def __init__(self, failure: Failure | None, ms: float, **values: object) -> None:
        self.code = "OK" if failure is None else failure.code
        self.reason = None if failure is None else failure.reason
        self.metadata = {} if failure is None else failure.metadata
        self.fields = () if failure is None else failure.fields
        self.ms = ms
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not in this result: {self.__dict__}")


def plain(message: Message) -> dict[str, Any]:
    """A message as a mapping; absent fields have their default unless they have presence."""
    whole: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.message_type is None:
            whole[field.name] = list(value) if field.is_repeated else value
        elif field.is_repeated:
            assert field.type == FieldDescriptor.TYPE_MESSAGE
            whole[field.name] = [plain(item) for item in value]
        else:
            whole[field.name] = plain(value)
    return whole


def generate_result(reply: Reply, ms: float) -> Result:
    deltas = [plain(delta) for delta in reply.deltas]
    logprobs = [delta["logprobs"] for delta in deltas if "logprobs" in delta]
    finish = deltas[-1].get("finish", {}) if deltas else {}
    joined = {name: [x for part in logprobs for x in part[name]] for name in LOGPROB_FIELDS}
    return Result(
        reply.failure,
        ms,
        started=None if reply.started is None else plain(reply.started),
        deltas=deltas,
        text=reply.text,
        token_ids=reply.token_ids,
        finish=reply.finish,
        matched=finish.get("stop_token_id", finish.get("stop_string")),
        usage=None if reply.completed is None else plain(reply.completed.usage),
        seed=None if reply.completed is None else reply.completed.seed,
        prompt_token_ids=reply.prompt_token_ids,
        top_count=logprobs[0]["top_count"] if logprobs else None,
        **joined,
    )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a send of the running case is."""

    flowing: asyncio.Event
    ended: asyncio.Event


class Run:
    """One case on one server; use once."""

    def __init__(self, gateway: Gateway, case: Case, context_length: int) -> None:
        self._gateway = gateway
        self._case = case
        self._context_length = context_length
        self._progress = {
            send.name: Progress(asyncio.Event(), asyncio.Event()) for send in case.sends
        }
        self._results: dict[str, Result] = {}

    async def results(self) -> dict[str, Result]:
        """Performs all sends: one after the other, but for tags and ``start_when``."""
        aside = [self._start(send) for send in self._case.sends if send.parallel == "all"]
        open_tasks: list[asyncio.Task[None]] = []
        open_tag: str | None = None
        for send in self._case.sends:
            if send.parallel == "all":
                continue
            in_group = send.parallel is not None and send.parallel == open_tag
            if not in_group and send.start_when in (None, "rest"):
                await asyncio.gather(*open_tasks)
                open_tasks.clear()
            open_tasks.append(self._start(send))
            open_tag = send.parallel
        await asyncio.gather(*open_tasks, *aside)
        return self._results

    def _start(self, send: Send) -> asyncio.Task[None]:
        return asyncio.create_task(self._perform(send))

    async def _perform(self, send: Send) -> None:
        if send.start_when is not None:
            await self._wait(send.start_when)
        progress = self._progress[send.name]
        started_s = time.monotonic()
        if send.rpc == "Generate":
            reply = await collect(self._call(send), progress.flowing)
            self._results[send.name] = generate_result(reply, 1e3 * (time.monotonic() - started_s))
        else:
            self._results[send.name] = await self._unary(send, started_s)
        progress.ended.set()

    async def _wait(self, start_when: str) -> None:
        match start_when.split(":"):
            case ["rest"]:
                await statistics_when(self._gateway, at_rest)
            case ["first_delta", name]:
                await self._progress[name].flowing.wait()
            case ["end", name]:
                await self._progress[name].ended.wait()
            case _:
                raise AssertionError(f"{self._case.id}: cannot wait for {start_when}")

    async def _unary(self, send: Send, started_s: float) -> Result:
        try:
            response = await self._call(send)
        except grpc.aio.AioRpcError as error:
            return Result(Failure.of(error), 1e3 * (time.monotonic() - started_s))
        return Result(None, 1e3 * (time.monotonic() - started_s), **plain(response))

    def _call(self, send: Send) -> Any:
        """The started call. Of its request only the bytes matter, so raw ones go the same way."""
        method = METHODS[send.rpc]
        if send.raw_hex is not None:
            wire = bytes.fromhex(send.raw_hex)
        else:
            body = with_context(send.body, self._context_length)
            message = json_format.ParseDict(body, GetMessageClass(method.input_type)())
            wire = message.SerializeToString()
        is_admin = send.rpc.startswith("Admin.")
        channel = self._gateway.admin_channel if is_admin else self._gateway.channel
        prepare = channel.unary_stream if method.server_streaming else channel.unary_unary
        path = f"/{method.containing_service.full_name}/{method.name}"
        response = GetMessageClass(method.output_type)
        call = prepare(path, response_deserializer=response.FromString)
        timeout_s = CALL_LIMIT_S if send.deadline_ms is None else send.deadline_ms / 1e3
        return call(wire, timeout=timeout_s)


def failed_assertions(case: Case, results: dict[str, Result], context_length: int) -> list[str]:
    """The assertions that do not hold; for a case with ``refused`` sends, what was not refused."""
    if case.refused:
        return [
            f"{name}: {result.code} {result.reason}"
            for name, result in results.items()
            if ((result.code, result.reason) in REFUSALS) != (name in case.refused)
        ]
    names = ASSERTION_NAMES | {"r": results, "v": case.values, "ctx": context_length}
    # The text comes from this repository; comprehensions in it see only globals.
    return [text for text in case.assertions if not eval(text, {"__builtins__": {}} | names)]


async def run_case(gateway: Gateway, case: Case, file: CaseFile) -> None:
    """Performs a case and asserts what it states, and that the server still answers rightly.

    Raises:
        AssertionError: with the results of all sends.
    """
    model = (await gateway.inference.GetModel(inference_pb2.GetModelRequest())).model
    results = await Run(gateway, case, model.context_length).results()
    failed = failed_assertions(case, results, model.context_length)
    seen = "\n".join(
        f"{name}: {vars(result)}"[:RESULT_SHOWN_MAX] for name, result in results.items()
    )
    assert not failed, f"{case.id} ({case.title}):\n{failed}\n{seen}"
    reply = await generate(gateway, request_of(file.nums_prompt_ids, len(file.nums_ids)))
    reply.check()
    assert reply.token_ids == file.nums_ids, f"the server answers wrongly after {case.id}"
