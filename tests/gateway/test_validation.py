"""Every rule of the public API's table over real gRPC: code, reason and the fields named."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import pytest

from gapless.protos.inference_pb2 import GetModelRequest
from tests.gateway.bodies import (
    HONOURED,
    INVALID,
    UNSUPPORTED,
    V,
    build,
    chat,
    sampling,
    scheduling,
    stopping,
)
from tests.gateway.harness import collect, refused, running, served_model


def test_every_rule_names_its_field() -> None:
    async def scenario() -> None:
        async with running(prompt_bytes_max=2000, default_max_new_tokens=64) as it:
            wrong = []
            for body, fields in INVALID:
                found = await refused(it.stub.Generate(build(body)))
                got = (found.code, found.reason, found.fields)
                if got != ("INVALID_ARGUMENT", "INVALID_FIELD", fields):
                    wrong.append((str(body)[:200], got))
            assert wrong == []
            assert it.scheduler.submits == []

    asyncio.run(scenario())


def test_fields_not_honoured_yet_are_refused_by_name() -> None:
    async def scenario() -> None:
        async with running() as it:
            wrong = []
            for body, field in UNSUPPORTED:
                found = await refused(it.stub.Generate(build(body)))
                got = (found.code, found.reason, found.metadata)
                if got != ("UNIMPLEMENTED", "UNSUPPORTED_FEATURE", {"field": field}):
                    wrong.append((body, got))
            assert wrong == []
            assert it.scheduler.submits == []

    asyncio.run(scenario())


def test_borders_of_the_ranges_and_neutral_values_are_honoured() -> None:
    async def scenario() -> None:
        async with running() as it:
            it.scheduler.plan = [5] * 3
            for body in HONOURED:
                call = it.stub.Generate(build(body))
                await collect(call)

    asyncio.run(scenario())


def test_what_is_not_there_and_what_is_not_allowed() -> None:
    async def scenario() -> None:
        async with running() as it:
            found = await refused(it.stub.Generate(build({"model": "gpt", **sampling(top_p=9)})))
            assert (found.code, found.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
            assert found.resource == ("model", "gpt")
            found = await refused(it.stub.Generate(build(scheduling(priority=1))))
            assert (found.code, found.reason) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
            assert found.metadata == {"field": "scheduling.priority"}
            found = await refused(it.stub.Generate(build(chat(chat_template="x"))))
            assert (found.code, found.reason) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
            assert found.metadata == {"field": "prompt.chat.chat_template"}

    asyncio.run(scenario())


def test_own_template_where_it_is_allowed() -> None:
    async def scenario() -> None:
        async with running(allow_chat_template=True) as it:
            it.scheduler.plan = [5]
            template = "{{ messages[0].content }}"
            await collect(it.stub.Generate(build(chat(chat_template=template))))
            for bad in ("", "x" * 65_537):
                found = await refused(it.stub.Generate(build(chat(chat_template=bad))))
                assert (found.code, found.fields) == (
                    "INVALID_ARGUMENT",
                    ["prompt.chat.chat_template"],
                )
            raising = "{{ raise_exception('no such turn') }}"
            found = await refused(it.stub.Generate(build(chat(chat_template=raising))))
            assert (found.code, found.reason) == ("INVALID_ARGUMENT", "TEMPLATE_ERROR")
            assert found.fields == ["prompt.chat"]

    asyncio.run(scenario())


def test_chat_needs_a_model_with_a_template() -> None:
    async def scenario() -> None:
        async with running(model=dataclasses.replace(served_model(), template=None)) as it:
            found = await refused(it.stub.Generate(build(chat())))
            assert (found.code, found.reason) == ("INVALID_ARGUMENT", "TEMPLATE_ERROR")
            assert found.fields == ["prompt.chat"]
            assert not (await it.stub.GetModel(GetModelRequest())).model.has_chat_template

    asyncio.run(scenario())


def test_tools_that_the_template_does_not_mention_are_refused() -> None:
    async def scenario() -> None:
        async with running() as it:
            body = chat(tools=[{"name": "get_weather_zq", "description": "Weather"}])
            found = await refused(it.stub.Generate(build(body)))
            assert (found.code, found.reason) == ("INVALID_ARGUMENT", "TEMPLATE_ERROR")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(1, -1), (-1, 1), (0, 10**9), (2**60, 0), (-(2**60), 0), (0, -5)]
)
def test_malformed_durations(seconds: int, nanos: int) -> None:
    async def scenario() -> None:
        async with running() as it:
            message = build({})
            message.stopping.soft_time_limit.seconds = seconds
            message.stopping.soft_time_limit.nanos = nanos
            message.scheduling.queue_timeout.seconds = seconds
            message.scheduling.queue_timeout.nanos = nanos
            found = await refused(it.stub.Generate(message))
            assert found.fields == ["stopping.soft_time_limit", "scheduling.queue_timeout"]

    asyncio.run(scenario())


def test_violations_are_ten_at_most_and_details_stay_small() -> None:
    async def scenario() -> None:
        async with running() as it:
            labels = {f"K{index}" + "é\n" * 2000: "" for index in range(16)}
            found = await refused(it.stub.Generate(build({"labels": labels})))
            assert len(found.fields) == 10
            assert all(len(field.encode()) <= 128 for field in found.fields)
            ids = [V] * 400
            body = {"prompt": {"token_ids": {"ids": ids}}}
            found = await refused(it.stub.Generate(build(body)))
            assert len(found.fields) == 10
            found = await refused(it.stub.Generate(build({"model": "m" * 100_000})))
            assert found.reason == "MODEL_NOT_FOUND"

    asyncio.run(scenario())


def test_prompt_and_output_must_fit() -> None:
    async def scenario() -> None:
        async with running() as it:
            # Context 512; the pool holds 400.
            async def reason(prompt: int, new: int | None) -> tuple[str, dict[str, str], list[str]]:
                body: dict[str, Any] = {"prompt": {"token_ids": {"ids": [5] * prompt}}}
                if new is not None:
                    body["stopping"] = {"max_new_tokens": new}
                found = await refused(it.stub.Generate(build(body)))
                assert found.code == "INVALID_ARGUMENT"
                return found.reason, found.metadata, found.fields

            context, pool = "CONTEXT_LENGTH_EXCEEDED", "KV_CAPACITY_EXCEEDED"
            new_field, prompt_field = ["stopping.max_new_tokens"], ["prompt"]
            long = {"promptTokens": "510", "maxTokens": "512"}
            assert await reason(510, 3) == (context, long, new_field)
            full = {"promptTokens": "512", "maxTokens": "512"}
            assert await reason(512, None) == (context, full, prompt_field)
            over = {"promptTokens": "513", "maxTokens": "512"}
            assert await reason(513, 1) == (context, over, prompt_field)
            held = {"promptTokens": "390", "maxPromptTokens": "389"}
            assert await reason(390, 11) == (pool, held, new_field)
            held = {"promptTokens": "400", "maxPromptTokens": "399"}
            assert await reason(400, None) == (pool, held, prompt_field)
            least = await reason(5, 2**32 - 1)
            assert least[0] == context

    asyncio.run(scenario())


def test_default_length_is_the_smaller_of_default_and_room() -> None:
    async def scenario() -> None:
        async with running(default_max_new_tokens=100) as it:
            it.scheduler.plan = [5]
            for prompt, expected in ((10, (100, False)), (300, (100, False)), (350, (50, True))):
                body = {"prompt": {"token_ids": {"ids": [5] * prompt}}}
                await collect(it.stub.Generate(build(body)))
                found = it.scheduler.submits[-1].stopping
                assert (found.max_new_tokens, found.max_new_tokens_is_room) == expected

    asyncio.run(scenario())


def test_everything_reaches_the_scheduler() -> None:
    async def scenario() -> None:
        async with running() as it:
            it.scheduler.plan = [5]
            body = {
                "sampling": {
                    "top_p": 0.5,
                    "min_p": 0.25,
                    "seed": 7,
                    "logit_bias": {9: 1.5, 3: -2},
                    "banned_token_ids": [3, 4],
                    "allowed_token_ids": [8, 6, 8],
                },
                "stopping": {
                    "max_new_tokens": 9,
                    "min_new_tokens": 2,
                    "stop_strings": ["é"],
                    "stop_token_ids": [0, 7],
                    "soft_time_limit": "1.5s",
                },
                "output": {"skip_special_tokens": False},
                "scheduling": {
                    "priority": -3,
                    "queue_timeout": "2s",
                    "session_id": "s",
                    "cache_salt": "c",
                    "bypass_prefix_cache": True,
                },
            }
            await collect(it.stub.Generate(build(body)))
            submit = it.scheduler.submits[0]
            chosen = submit.sampling
            assert (chosen.temperature, chosen.top_k) == (0.75, 40), "the model's defaults"
            assert (chosen.top_p, chosen.min_p, chosen.seed) == (0.5, 0.25, 7)
            bias = dict(zip(chosen.bias_tokens, chosen.bias_values, strict=True))
            assert bias == {3: -math.inf, 4: -math.inf, 9: 1.5}
            assert chosen.allowed_tokens == (8, 6)
            stops = submit.stopping
            assert (stops.max_new_tokens, stops.min_new_tokens) == (9, 2)
            assert stops.stop_strings == ("é".encode(),)
            assert stops.stop_tokens == (0, 2, 7), "the model's end tokens, then the caller's"
            assert not stops.skip_special_tokens
            assert submit.time_limit_s == 1.5
            assert (submit.priority, submit.queue_timeout_s) == (-3, 2.0)
            assert (submit.session_id, submit.cache_salt) == ("s", "c")
            assert submit.bypass_prefix_cache
            await collect(it.stub.Generate(build(stopping(ignore_eos=True, stop_token_ids=[7]))))
            assert it.scheduler.submits[1].stopping.stop_tokens == (7,)

    asyncio.run(scenario())
