"""A generation over real gRPC: order of messages, positions, what is sent when."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from gapless.protos import inference_pb2
from gapless.protos.messages import Failed, FinishReason, PrefillStarted
from gapless.protos.reasons import Reason
from tests.gateway.harness import MODEL_NAME, collect, refused, request, running, token, tokens
from tests.models import END_TOKEN


def test_stream_of_one_request() -> None:
    async def scenario() -> None:
        async with running() as it:
            call = it.stub.Generate(request(request_id="a:1"))
            submit = await it.scheduler.submitted()
            for character in "ok!":
                it.scheduler.write(submit, [token(character)])
            it.scheduler.finish(submit, FinishReason.STOP_TOKEN, [END_TOKEN], stop_token=END_TOKEN)
            answer = await collect(call)
            assert answer.started is not None
            assert answer.completed is not None
            assert answer.started.request_id == "a:1"
            assert answer.started.model == MODEL_NAME
            assert answer.started.prompt_tokens == len(submit.prompt) // 4
            assert answer.started.attachment == 1
            assert not answer.started.resumable
            assert answer.text == "ok!"
            assert answer.token_ids == [*tokens("ok!"), END_TOKEN]
            finish = answer.deltas[-1].finish
            assert finish.reason == inference_pb2.FINISH_REASON_STOP_TOKEN
            assert finish.stop_token_id == END_TOKEN
            usage = answer.completed.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (1, 4)
            assert usage.cached_prompt_tokens == 4
            timing = answer.completed.timing
            assert timing.preemption_count == 1
            assert timing.prefill_duration.ToMilliseconds() == 500
            assert timing.decode_duration.ToMilliseconds() == 1000
            assert timing.queue_duration.ToMilliseconds() >= 250
            assert timing.time_to_first_token.ToNanoseconds() > 0
            assert timing.received_time.seconds > 1_600_000_000
            assert len(it.gateway.streams) == 0
            assert not it.scheduler.cancels

    asyncio.run(scenario())


def test_nothing_is_sent_before_admission() -> None:
    async def scenario() -> None:
        async with running() as it:
            it.scheduler.admits = False
            call = it.stub.Generate(request())
            headers = asyncio.create_task(call.initial_metadata())
            submit = await it.scheduler.submitted()
            # An answer on the same connection is behind whatever the first call had sent.
            await it.stub.ListModels(inference_pb2.ListModelsRequest())
            assert not headers.done()
            it.scheduler.admit(submit)
            it.scheduler.finish(submit, FinishReason.MAX_NEW_TOKENS, [token("x")])
            await headers
            assert (await collect(call)).text == "x"

    asyncio.run(scenario())


def test_what_precedes_the_first_token_goes_when_prefill_begins() -> None:
    async def scenario() -> None:
        async with running() as it:
            output = inference_pb2.OutputOptions(prompt_token_ids=True)
            call = it.stub.Generate(request(output=output))
            submit = await it.scheduler.submitted()
            it.scheduler.write(submit, (), PrefillStarted(submit.handle, 0.0))
            assert (await call.read()).HasField("started")
            assert (await call.read()).HasField("prompt")
            it.scheduler.fail(submit, Failed(submit.handle, Reason.EXECUTOR_LOST, "gone"))
            assert (await refused(call)).reason == "EXECUTOR_LOST"

    asyncio.run(scenario())


def test_burst_of_tokens_is_one_delta() -> None:
    async def scenario() -> None:
        async with running() as it:
            call = it.stub.Generate(
                request(output=inference_pb2.OutputOptions(flush_interval_ms=1000))
            )
            submit = await it.scheduler.submitted()
            it.scheduler.write(submit, [token("a")])
            first = await call.read()
            second = await call.read()
            assert first.HasField("started")
            assert second.delta.text == "a", "the first token is never delayed"
            for character in "bcdefgh":
                it.scheduler.write(submit, [token(character)])
            it.scheduler.finish(submit, FinishReason.MAX_NEW_TOKENS, [token("i")])
            third = await call.read()
            assert third.delta.text == "bcdefghi", "all in one, and at once with the end"
            assert third.delta.token_count == 8
            assert third.delta.finish.reason == inference_pb2.FINISH_REASON_MAX_NEW_TOKENS
            assert (await call.read()).HasField("completed")
            assert await call.read() is grpc.aio.EOF

    asyncio.run(scenario())


def test_tokens_in_between_wait_for_the_flush_interval() -> None:
    async def scenario() -> None:
        async with running() as it:
            call = it.stub.Generate(
                request(output=inference_pb2.OutputOptions(flush_interval_ms=50))
            )
            submit = await it.scheduler.submitted()
            it.scheduler.write(submit, [token("a")])
            await call.read()
            await call.read()
            for character in "bcd":
                it.scheduler.write(submit, [token(character)])
            third = await call.read()
            assert third.delta.text == "bcd"
            it.scheduler.finish(submit, FinishReason.MAX_NEW_TOKENS)
            last = await call.read()
            assert last.delta.token_count == 0
            assert last.delta.first_token_index == 4
            call.cancel()

    asyncio.run(scenario())


def test_stop_string_never_leaks_and_is_named() -> None:
    async def scenario() -> None:
        async with running() as it:
            call = it.stub.Generate(
                request(stopping=inference_pb2.StoppingParams(stop_strings=["zz", "END"]))
            )
            submit = await it.scheduler.submitted()
            assert submit.stopping.stop_strings == (b"zz", b"END")
            for character in "go EN":
                it.scheduler.write(submit, [token(character)])
            it.scheduler.finish(submit, FinishReason.STOP_STRING, [token("D")], stop_string_index=1)
            answer = await collect(call)
            assert answer.text == "go "
            assert answer.deltas[-1].finish.stop_string == "END"
            assert answer.completed is not None
            assert answer.completed.usage.completion_tokens == 6

    asyncio.run(scenario())


def test_only_what_was_asked_for_comes_back() -> None:
    async def scenario() -> None:
        async with running() as it:
            it.scheduler.plan = tokens("hey")
            options = inference_pb2.OutputOptions(text=False, token_ids=True, prompt_token_ids=True)
            prompt = inference_pb2.Prompt(
                token_ids=inference_pb2.TokenIds(ids=range(3, 203)), truncate_to_last_tokens=150
            )
            stopping = inference_pb2.StoppingParams(max_new_tokens=2)
            answer = await collect(
                it.stub.Generate(request(prompt=prompt, output=options, stopping=stopping))
            )
            assert answer.text == ""
            assert answer.token_ids == tokens("he")
            assert answer.prompt_ids == list(range(53, 203))

    asyncio.run(scenario())


def test_large_prompt_comes_back_in_slices_below_a_mebibyte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gapless.gateway.generate.PROMPT_SLICE_TOKENS_MAX", 64)
    monkeypatch.setattr("gapless.gateway.generate.DELTA_TOKENS_MAX", 16)

    async def scenario() -> None:
        async with running() as it:
            it.scheduler.plan = tokens("x" * 100)
            options = inference_pb2.OutputOptions(prompt_token_ids=True)
            prompt = inference_pb2.Prompt(token_ids=inference_pb2.TokenIds(ids=[5] * 200))
            answer = await collect(it.stub.Generate(request(prompt=prompt, output=options)))
            assert answer.prompt_ids == [5] * 200
            assert answer.text == "x" * 100
            assert max(delta.token_count for delta in answer.deltas) == 16

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_seed_of_the_caller_is_in_force(seed: int) -> None:
    async def scenario() -> None:
        async with running() as it:
            it.scheduler.plan = [5]
            call = it.stub.Generate(request(sampling=inference_pb2.SamplingParams(seed=seed)))
            answer = await collect(call)
            assert answer.completed is not None
            assert answer.completed.seed == seed == it.scheduler.submits[0].sampling.seed

    asyncio.run(scenario())


def test_drawn_seeds_and_ids_differ_and_are_told() -> None:
    async def scenario() -> None:
        async with running() as it:
            it.scheduler.plan = [5]
            answers = [await collect(it.stub.Generate(request())) for _ in range(3)]
            seeds = {answer.completed.seed for answer in answers if answer.completed}
            ids = {answer.started.request_id for answer in answers if answer.started}
            assert len(seeds) == len(ids) == 3
            assert seeds == {submit.sampling.seed for submit in it.scheduler.submits}
            assert ids == {submit.request_id for submit in it.scheduler.submits}
            assert len({submit.handle for submit in it.scheduler.submits}) == 3

    asyncio.run(scenario())
