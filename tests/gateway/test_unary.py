"""Tokenize, Detokenize, GetModel, ListModels and the operators' service over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gapless.gateway.admin import stats_message
from gapless.gateway.model import DefaultSampling
from gapless.protos import admin_pb2, inference_pb2
from tests.gateway.fake_scheduler import CONTEXT_LENGTH, LIMITS, STATS
from tests.gateway.harness import (
    MODEL_NAME,
    REVISION,
    refused,
    running,
    tokens,
)
from tests.models import END_TOKEN, VOCAB_SIZE


def test_tokenize_and_back() -> None:
    async def scenario() -> None:
        async with running() as it:
            prompt = inference_pb2.Prompt(text="a\0b <|im_end|>")
            message = inference_pb2.TokenizeRequest(prompt=prompt, return_offsets=True)
            found = await it.stub.Tokenize(message)
            assert list(found.token_ids) == [*tokens("a\0b "), END_TOKEN]
            assert found.token_count == 5
            assert found.rendered_text == "a\0b <|im_end|>"
            assert list(found.start_bytes) == [0, 1, 2, 3, 4]
            assert list(found.end_bytes) == [1, 2, 3, 4, 14]
            message.return_token_ids = False
            message.return_offsets = False
            found = await it.stub.Tokenize(message)
            assert (found.token_count, len(found.token_ids), len(found.start_bytes)) == (5, 0, 0)
            ids = [*tokens("é"), END_TOKEN]
            text = await it.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))
            assert text.text == "é"
            text = await it.stub.Detokenize(
                inference_pb2.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)
            )
            assert text.text == "é<|im_end|>"

    asyncio.run(scenario())


def test_tokenize_renders_chats_as_generate_does() -> None:
    async def scenario() -> None:
        async with running() as it:
            it.scheduler.plan = [5]
            message = inference_pb2.ChatMessage(role="user", content="hi")
            prompt = inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=[message]))
            found = await it.stub.Tokenize(inference_pb2.TokenizeRequest(prompt=prompt))
            wanted = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
            assert found.rendered_text == wanted
            call = it.stub.Generate(inference_pb2.GenerateRequest(prompt=prompt))
            started = await call.read()
            assert started.started.prompt_tokens == found.token_count

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "message", "code", "field"),
    [
        ("Tokenize", inference_pb2.TokenizeRequest(), "INVALID_ARGUMENT", "prompt.input"),
        (
            "Tokenize",
            inference_pb2.TokenizeRequest(
                prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[VOCAB_SIZE]))
            ),
            "INVALID_ARGUMENT",
            "prompt.token_ids.ids[0]",
        ),
        (
            "Tokenize",
            inference_pb2.TokenizeRequest(prompt=inference_pb2.Prompt(text="x" * (1 << 20))),
            "INVALID_ARGUMENT",
            "prompt",
        ),
        (
            "Tokenize",
            inference_pb2.TokenizeRequest(
                prompt=inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[5])),
                return_offsets=True,
            ),
            "INVALID_ARGUMENT",
            "return_offsets",
        ),
        ("Detokenize", inference_pb2.DetokenizeRequest(), "INVALID_ARGUMENT", "token_ids"),
        (
            "Detokenize",
            inference_pb2.DetokenizeRequest(token_ids=[1] * (CONTEXT_LENGTH + 1)),
            "INVALID_ARGUMENT",
            "token_ids",
        ),
        (
            "Detokenize",
            inference_pb2.DetokenizeRequest(token_ids=[1, VOCAB_SIZE]),
            "INVALID_ARGUMENT",
            "token_ids[1]",
        ),
        ("Tokenize", inference_pb2.TokenizeRequest(model="gpt"), "NOT_FOUND", None),
        ("Detokenize", inference_pb2.DetokenizeRequest(model="gpt"), "NOT_FOUND", None),
        ("GetModel", inference_pb2.GetModelRequest(model="gpt"), "NOT_FOUND", None),
    ],
)
def test_refusals(method: str, message: Any, code: str, field: str | None) -> None:
    async def scenario() -> None:
        async with running() as it:
            found = await refused(getattr(it.stub, method)(message))
            assert found.code == code
            if field is not None:
                assert found.fields == [field]
            else:
                assert found.reason == "MODEL_NOT_FOUND"

    asyncio.run(scenario())


def test_model_is_described() -> None:
    async def scenario() -> None:
        async with running(default_max_new_tokens=77) as it:
            for request in ("", MODEL_NAME):
                response = await it.stub.GetModel(inference_pb2.GetModelRequest(model=request))
            model = response.model
            listed = await it.stub.ListModels(inference_pb2.ListModelsRequest())
            assert list(listed.models) == [model]
            assert (model.name, model.architecture) == (MODEL_NAME, "LlamaForCausalLM")
            assert (model.revision, model.vocab_size) == (REVISION, VOCAB_SIZE)
            assert model.context_length == CONTEXT_LENGTH
            assert model.max_prompt_tokens == LIMITS.prompt_tokens_max
            assert model.max_prompt_bytes == 8 << 20
            assert list(model.eos_token_ids) == [0, END_TOKEN]
            assert model.has_chat_template
            assert model.default_max_new_tokens == 77
            assert list(model.supported_constraints) == list(model.adapters) == []
            default = model.default_sampling
            assert (default.temperature, default.top_k) == (0.75, 40)
            assert (default.top_p, default.min_p) == (1.0, 0.0)
            assert default.HasField("top_p")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, DefaultSampling()),
        ({"do_sample": False}, DefaultSampling()),
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
            DefaultSampling(0.6, 0.9, 20, 0.1),
        ),
        ({"temperature": 0, "top_k": 0}, DefaultSampling(temperature=0.0)),
        ({"top_k": 10**9}, DefaultSampling(top_k=VOCAB_SIZE)),
        ({"temperature": None, "top_p": None}, DefaultSampling()),
    ],
)
def test_default_sampling(config: dict[str, Any], expected: DefaultSampling) -> None:
    assert DefaultSampling.of(config, VOCAB_SIZE) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": 9},
        {"temperature": "hot"},
        {"top_p": 0},
        {"min_p": -1},
        {"repetition_penalty": 1.3},
    ],
)
def test_defaults_that_cannot_be_are_left_out_loudly(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert DefaultSampling.of(config, VOCAB_SIZE) == DefaultSampling()
    assert next(iter(config)) in caplog.text


# ------------------------------------------------------------------ operators


def test_stats_are_mapped() -> None:
    message = stats_message(STATS, open_streams=4, now_wall_s=1000.0)
    assert message.time.ToSeconds() == 1000
    assert message.state == admin_pb2.SERVER_STATE_SERVING
    assert (message.running_requests, message.queued_requests) == (3, 5)
    assert (message.queued_uncached_tokens, message.open_streams) == (700, 4)
    assert message.detached_requests == 0
    assert message.oldest_queued_age.ToMilliseconds() == 1500
    assert (message.requests_total, message.requests_rejected_total) == (101, 7)
    assert (message.requests_failed_total, message.requests_cancelled_total) == (2, 17)
    assert (message.prompt_tokens_total, message.cached_prompt_tokens_total) == (1000, 19)
    assert (message.generated_tokens_total, message.preemptions_total) == (2000, 23)
    assert message.generated_tokens_per_second == 55.5
    (executor,) = message.executors
    assert executor.healthy
    assert (executor.kv_blocks_active, executor.kv_blocks_free) == (11, 13)
    assert executor.last_step_time.ToMilliseconds() == 999_500
    assert executor.mean_step_duration.ToMilliseconds() == 25
    gaps = executor.device_gaps
    assert executor.device_active.ToNanoseconds() == 90_000_000_001
    assert (gaps.no_request.ToNanoseconds(), gaps.scheduler.ToNanoseconds()) == (4, 3)
    assert (gaps.border_and_upload.ToNanoseconds(), gaps.launch.ToNanoseconds()) == (2, 1)
    histogram = executor.bubble_histogram
    assert list(histogram.upper_bounds_us)[:3] == [1, 2, 5]
    assert list(histogram.counts) == list(range(14))
    assert len(histogram.counts) == len(histogram.upper_bounds_us) + 1
    steps = executor.step_histogram
    assert list(steps.upper_bounds_us)[:2] == [100, 104]
    assert list(steps.token_counts) == list(range(258))
    assert len(steps.token_counts) == len(steps.upper_bounds_us) + 1


def test_admin_service() -> None:
    async def scenario() -> None:
        async with running() as it:
            info = await it.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
            assert (info.instance_id, info.api_version) == ("instance-1", "v1.1")
            assert info.version
            assert info.start_time.seconds > 1_600_000_000
            assert (info.max_running_requests, info.max_queued_requests) == (64, 1024)
            (executor,) = info.executors
            assert (executor.device, executor.kv_block_tokens) == ("cpu", 16)
            assert executor.kv_blocks_total == 26
            snapshot = await it.admin.GetStats(admin_pb2.GetStatsRequest())
            assert snapshot.stats.requests_total == 101
            assert snapshot.stats.executors[0].executor_id == executor.executor_id
            watch = it.admin.WatchStats(admin_pb2.WatchStatsRequest(interval_ms=100))
            for _ in range(3):
                assert (await watch.read()).stats.queued_requests == 5
            for interval_ms in (0, 99, 60_001):
                message = admin_pb2.WatchStatsRequest(interval_ms=interval_ms)
                assert (await refused(it.admin.WatchStats(message))).fields == ["interval_ms"]
            for call in (
                it.admin.Drain(admin_pb2.DrainRequest()),
                it.admin.Undrain(admin_pb2.UndrainRequest()),
                it.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest()),
            ):
                found = await refused(call)
                assert (found.code, found.reason) == ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE")

    asyncio.run(scenario())


def test_admin_is_not_on_the_public_port() -> None:
    async def scenario() -> None:
        async with running() as it:
            call = it.channel.unary_unary(
                "/gapless.v1.AdminService/GetStats",
                request_serializer=admin_pb2.GetStatsRequest.SerializeToString,
            )
            assert (await refused(call(admin_pb2.GetStatsRequest()))).code == "UNIMPLEMENTED"

    asyncio.run(scenario())


def test_reflection_lists_the_services() -> None:
    async def scenario() -> None:
        async with running() as it:
            stub = reflection_pb2_grpc.ServerReflectionStub(it.channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            call = stub.ServerReflectionInfo(iter([request]))
            response = await call.read()
            names = {service.name for service in response.list_services_response.service}
            assert {"gapless.v1.InferenceService", "grpc.health.v1.Health"} <= names
            assert "gapless.v1.AdminService" not in names

    asyncio.run(scenario())
