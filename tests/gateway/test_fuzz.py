"""Random, truncated and mutated bytes to every method: only listed codes, and the server lives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from gapless.protos import admin_pb2, inference_pb2
from gapless.protos.reasons import Reason
from tests.gateway.bodies import HONOURED, INVALID, UNSUPPORTED, build
from tests.gateway.harness import collect, refusal_of, request, running

CODES = {
    "OK",
    "INVALID_ARGUMENT",
    "UNIMPLEMENTED",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
}
"""INTERNAL and UNKNOWN are not among them: bytes of a client are never our bug."""
SERVICE = "/gapless.v1.InferenceService"
ADMIN = "/gapless.v1.AdminService"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def seeds() -> dict[str, list[bytes]]:
    """Messages of each method from which the bytes are derived."""
    bodies = [*HONOURED, *(body for body, _ in [*INVALID, *UNSUPPORTED])]
    generate = [build(body).SerializeToString() for body in bodies]
    small = [data for data in generate if len(data) < 2000]
    prompt: dict[str, Any] = {"prompt": {"text": "hello"}, "return_offsets": True}
    tokenize = json_format.ParseDict(prompt, inference_pb2.TokenizeRequest())
    return {
        f"{SERVICE}/Generate": small,
        f"{SERVICE}/CancelGenerate": [
            inference_pb2.CancelGenerateRequest(request_ids=["a", "b"]).SerializeToString()
        ],
        f"{SERVICE}/Tokenize": [tokenize.SerializeToString()],
        f"{SERVICE}/Detokenize": [
            inference_pb2.DetokenizeRequest(token_ids=[1, 2]).SerializeToString()
        ],
        f"{SERVICE}/GetModel": [inference_pb2.GetModelRequest(model="x").SerializeToString()],
        f"{SERVICE}/ListModels": [b""],
        f"{ADMIN}/GetStats": [b""],
        f"{ADMIN}/WatchStats": [admin_pb2.WatchStatsRequest(interval_ms=100).SerializeToString()],
        f"{ADMIN}/Drain": [admin_pb2.DrainRequest(exit_when_done=True).SerializeToString()],
        "/grpc.health.v1.Health/Check": [b"\x0a\x04name"],
        "/grpc.health.v1.Health/Watch": [b"\x0a\x04name"],
        REFLECTION: [b"\x3a\x00", b"\x1a\x04name"],
    }


def inputs(chance: random.Random, from_bytes: list[bytes], count: int) -> Iterator[bytes]:
    """`count` byte strings: noise, prefixes, flipped bytes, spliced pieces."""
    for _ in range(count):
        data = bytearray(chance.choice(from_bytes))
        match chance.randrange(4):
            case 0:
                yield chance.randbytes(chance.randrange(64))
            case 1:
                yield bytes(data[: chance.randrange(len(data) + 1)])
            case 2:
                for _ in range(chance.randrange(1, 5)):
                    if data:
                        data[chance.randrange(len(data))] = chance.randrange(256)
                yield bytes(data)
            case _:
                other = chance.choice(from_bytes)
                yield bytes(data[: chance.randrange(len(data) + 1)]) + other


async def send(channel: Any, method: str, data: bytes) -> tuple[str, str]:
    """Code and reason that a call with these bytes ends with."""
    streaming = method.endswith(("/Generate", "Watch", "WatchStats", "/Drain"))
    if method == REFLECTION:
        call = channel.stream_stream(method)(iter([data]))
    elif streaming:
        call = channel.unary_stream(method)(data, timeout=5)
    else:
        call = channel.unary_unary(method)(data, timeout=5)
    try:
        if hasattr(call, "read"):
            if method.endswith(("Watch", "WatchStats")):
                await call.read()  # these never end by themselves
                call.cancel()
                return "OK", ""
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        found = refusal_of(error)
        return found.code, found.reason
    return "OK", ""


@pytest.mark.parametrize("seed", range(3))
def test_fuzz(seed: int) -> None:
    async def scenario() -> None:
        chance = random.Random(seed)
        async with running() as it:
            it.scheduler.plan = [5] * 3
            async with grpc.aio.insecure_channel(it.gateway.addresses[1]) as admin_channel:
                for method, from_bytes in seeds().items():
                    channel = admin_channel if method.startswith(ADMIN) else it.channel
                    count = 300 if method.endswith("/Generate") else 30
                    for data in inputs(chance, from_bytes, count):
                        code, reason = await send(channel, method, data)
                        assert code in CODES, (method, data, code, reason)
                        if code != "OK" and "grpc." not in method:
                            assert reason in Reason.__members__, (method, data, code, reason)
            await collect(it.stub.Generate(request()))
            assert len(it.gateway.streams) == 0

    asyncio.run(scenario())
