"""A real gateway on a real port, in front of a fake scheduler, for the tests of this folder."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gapless.gateway.config import Config
from gapless.gateway.health import INFERENCE_SERVICE
from gapless.gateway.model import ServedModel
from gapless.gateway.server import Gateway
from gapless.protos import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.gateway.fake_scheduler import FakeScheduler, facts
from tests.models import BYTE_TOKENS_AT, END_TOKEN, VOCAB_SIZE, write_tokenizer

MODEL_NAME = "tiny"
REVISION = "0123456789abcdef"
GENERATION_CONFIG = {"temperature": 0.75, "top_k": 40, "eos_token_id": [END_TOKEN, 0]}


def write_description(folder: Path) -> Path:
    """A model folder without weights: all that a gateway reads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 0,
        "eos_token_id": END_TOKEN,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    (folder / "revision").write_text(REVISION)
    return folder


@functools.cache
def served_model() -> ServedModel:
    """The tiny model as a gateway sees it; read once, immutable."""
    with tempfile.TemporaryDirectory() as folder:
        return ServedModel.load(write_description(Path(folder) / "model"), MODEL_NAME)


def token(character: str) -> int:
    """The token of an ASCII character."""
    return BYTE_TOKENS_AT + ord(character)


def tokens(text: str) -> list[int]:
    """One token a byte."""
    return [BYTE_TOKENS_AT + byte for byte in text.encode()]


@dataclasses.dataclass(slots=True)
class Running:
    """A gateway that runs, and what is around it."""

    gateway: Gateway
    scheduler: FakeScheduler
    channel: Any
    stub: Any
    admin: Any
    task: asyncio.Task[int]


@contextlib.asynccontextmanager
async def running(*, ready: bool = True, **settings: Any) -> AsyncIterator[Running]:
    """Starts both and connects; ends whatever the test left. `ready`: wait until it serves."""
    with tempfile.TemporaryDirectory() as folder:
        scheduler = FakeScheduler(Path(folder), facts(REVISION, VOCAB_SIZE))
        try:
            async with gateway_at(Path(folder), scheduler, ready=ready, **settings) as it:
                yield it
        finally:
            scheduler.close()


@contextlib.asynccontextmanager
async def gateway_at(
    run_folder: Path,
    scheduler: FakeScheduler,
    *,
    ready: bool = True,
    model: ServedModel | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A gateway beside a scheduler that stands already; it serves the tiny model unless told."""
    defaults: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "admin_listen": "127.0.0.1:0",
        "lame_duck_s": 0.0,
        "stop_grace_s": 1.0,
        "silence_max_s": 1000.0,
    }
    config = Config(
        run_folder=run_folder,
        model_folder=run_folder / "model",
        model_name=MODEL_NAME,
        **{**defaults, **settings},
    )
    gateway = Gateway(config, model or served_model())
    await gateway.start()
    task = asyncio.create_task(gateway.run())
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(gateway.addresses[0], options) as channel,
        grpc.aio.insecure_channel(gateway.addresses[1], options) as admin_channel,
    ):
        if ready:
            await until_serving(channel, serving=True)
        try:
            yield Running(
                gateway,
                scheduler,
                channel,
                inference_pb2_grpc.InferenceServiceStub(channel),
                admin_pb2_grpc.AdminServiceStub(admin_channel),
                task,
            )
        finally:
            gateway.force()
            await task


async def until_serving(channel: Any, *, serving: bool) -> None:
    """Returns when the gateway's health says that it serves, or no longer does."""
    wanted = health_pb2.HealthCheckResponse.SERVING
    message = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
    call = health_pb2_grpc.HealthStub(channel).Watch(message)
    async for response in call:
        if (response.status == wanted) is serving:
            call.cancel()
            return


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    """A valid request; `fields` override."""
    defaults: dict[str, Any] = {
        "prompt": inference_pb2.Prompt(text="hello"),
        "output": inference_pb2.OutputOptions(flush_interval_ms=0, token_ids=True),
    }
    return inference_pb2.GenerateRequest(**{**defaults, **fields})


@dataclasses.dataclass(slots=True)
class Answer:
    """A whole stream, read to its end."""

    started: inference_pb2.GenerationStarted | None
    deltas: list[inference_pb2.GenerationDelta]
    prompt_ids: list[int]
    completed: inference_pb2.GenerationCompleted | None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]


async def collect(call: Any) -> Answer:
    """Reads a stream and asserts the order of its messages and the positions of its deltas."""
    answer = Answer(None, [], [], None)
    async for response in call:
        event = response.WhichOneof("event")
        assert answer.completed is None, "completed is the last message"
        if event == "started":
            assert answer.started is None, "started comes once"
            answer.started = response.started
            continue
        assert answer.started is not None, "started is the first message"
        if event == "prompt":
            assert not answer.deltas, "the prompt comes before the first delta"
            assert response.prompt.first_token_index == len(answer.prompt_ids)
            answer.prompt_ids.extend(response.prompt.token_ids)
        elif event == "delta":
            covered = sum(delta.token_count for delta in answer.deltas)
            assert response.delta.first_token_index == covered
            answer.deltas.append(response.delta)
        else:
            answer.completed = response.completed
    assert answer.completed is not None, "an OK stream has a completed message"
    assert [delta.HasField("finish") for delta in answer.deltas].index(True) + 1 == len(
        answer.deltas
    ), "finish stands in the last delta, once"
    return answer


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """An error status as a client reads it."""

    code: str
    reason: str
    metadata: dict[str, str]
    fields: list[str]
    descriptions: list[str]
    resource: tuple[str, str] | None
    retry_after_s: float | None
    pushback_ms: int | None
    message: str


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    """Parses code, details and trailing metadata."""
    trailing = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailing.get("grpc-status-details-bin", b""))
    if status.details:
        assert status.code == error.code().value[0], "both statuses agree"
        assert status.message == error.details(), "both messages agree"
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    resource = error_details_pb2.ResourceInfo()
    retry = error_details_pb2.RetryInfo()
    seen = {
        type(m).__name__
        for m in (info, bad_request, resource, retry)
        for d in status.details
        if d.Unpack(m)
    }
    pushback = trailing.get("grpc-retry-pushback-ms")
    return Refusal(
        code=error.code().name,
        reason=info.reason,
        metadata=dict(info.metadata),
        fields=[violation.field for violation in bad_request.field_violations],
        descriptions=[violation.description for violation in bad_request.field_violations],
        resource=(
            (resource.resource_type, resource.resource_name) if "ResourceInfo" in seen else None
        ),
        retry_after_s=retry.retry_delay.ToTimedelta().total_seconds()
        if "RetryInfo" in seen
        else None,
        pushback_ms=int(pushback) if pushback is not None else None,
        message=error.details(),
    )


async def refused(call: Any) -> Refusal:
    """The error with which a call ends; fails if it ends well."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    raise AssertionError("the call ended well")
