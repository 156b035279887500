"""Random, truncated and damaged messages to every method of a live server, which goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from gapless.protos import admin_pb2, inference_pb2
from tests.processes.calls import (
    CALL_LIMIT_S,
    Failure,
    at_rest,
    connect,
    generate,
    request_of,
    statistics_when,
)
from tests.processes.noise import Noise
from tests.processes.server import Server

pytestmark = pytest.mark.processes

ROUND_COUNT = 12
"""Of six messages to each method."""
RESPONSES_READ_MAX = 20
PROMPT = [7, 8, 9, 10, 11]

REFUSALS = {
    *("INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "PERMISSION_DENIED"),
    *("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION", "ALREADY_EXISTS"),
    *("OUT_OF_RANGE",),
}
"""What a request can be answered with; INTERNAL is for bytes that are no message at all, and
UNKNOWN is for bugs."""

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
ENDS_THE_SERVER = {"Drain"}
ENDLESS = {"Watch", "WatchStats"}
"""After the first answer they speak on a change or at an interval only."""


def methods(service: ServiceDescriptor) -> list[MethodDescriptor]:
    return [method for method in service.methods if method.name not in ENDS_THE_SERVER]


def sample(method: MethodDescriptor) -> Message:
    """A valid message, to be damaged."""
    match method.input_type.name:
        case "GenerateRequest":
            return request_of(PROMPT, 4, request_id="noise:1")
        case "CancelGenerateRequest":
            return inference_pb2.CancelGenerateRequest(request_ids=["noise:1"], reason="noise")
        case "TokenizeRequest":
            return inference_pb2.TokenizeRequest(prompt=request_of("Hi", 1).prompt)
        case "DetokenizeRequest":
            return inference_pb2.DetokenizeRequest(token_ids=PROMPT)
        case _:
            return GetMessageClass(method.input_type)()


def wires(method: MethodDescriptor, seed: int) -> Iterator[bytes]:
    """Serialised requests: junk, a valid one cut, damaged and changed, and nonsense."""
    noise = Noise(seed)
    valid = sample(method)
    whole = valid.SerializeToString()
    yield noise.junk()
    yield noise.truncated(whole)
    yield noise.damaged(whole)
    yield noise.one_field_changed(valid).SerializeToString()
    yield noise.one_field_changed(valid).SerializeToString()
    yield noise.message(method.input_type).SerializeToString()


def is_message(method: MethodDescriptor, wire: bytes) -> bool:
    try:
        GetMessageClass(method.input_type).FromString(wire)
    except DecodeError:
        return False
    return True


async def send(channel: grpc.aio.Channel, method: MethodDescriptor, wire: bytes) -> str:
    """The code of the answer; of a stream only the first responses are read."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.server_streaming:
            stream = channel.unary_stream(path)(wire, timeout=CALL_LIMIT_S)
            for _ in range(1 if method.name in ENDLESS else RESPONSES_READ_MAX):
                if await stream.read() is grpc.aio.EOF:
                    return str((await stream.code()).name)
            stream.cancel()
        else:
            await channel.unary_unary(path)(wire, timeout=CALL_LIMIT_S)
    except grpc.aio.AioRpcError as error:
        return Failure.of(error).code
    return "OK"


@pytest.mark.parametrize("service", [INFERENCE, ADMIN, HEALTH], ids=lambda service: service.name)
def test_a_server_survives_noise(tiny_server: Server, service: ServiceDescriptor) -> None:
    address = tiny_server.admin_address if service is ADMIN else tiny_server.address

    async def check(channel: grpc.aio.Channel, method: MethodDescriptor, wire: bytes) -> None:
        code = await send(channel, method, wire)
        if is_message(method, wire):
            assert code == "OK" or code in REFUSALS, (method.name, wire, code)
        else:
            assert code in {"INTERNAL", "INVALID_ARGUMENT"}, (method.name, wire, code)

    async def scenario() -> None:
        async with (
            connect(tiny_server.address, tiny_server.admin_address) as gateway,
            grpc.aio.insecure_channel(address) as channel,
        ):
            before = await generate(gateway, request_of(PROMPT, 8))
            for seed in range(ROUND_COUNT):
                await asyncio.gather(
                    *(
                        check(channel, method, wire)
                        for method in methods(service)
                        for wire in wires(method, seed)
                    )
                )
            after = await generate(gateway, request_of(PROMPT, 8))
            after.check()
            assert after.token_ids == before.token_ids
            await statistics_when(gateway, at_rest)

    asyncio.run(scenario())
