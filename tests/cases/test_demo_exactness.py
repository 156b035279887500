"""Greedy tokens of the demo model through gRPC equal transformers' own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.processes.calls import connect, generate_all, request_of
from tests.processes.reference import Reference
from tests.processes.server import Server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.model,
    pytest.mark.timeout(400),  # the first one may fetch and convert the model
]

NEW_TOKENS = 24
GAP_MIN = 1e-3
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Monday, Tuesday, Wednesday,",
    "Water boils at 100 degrees and freezes at",
)


def test_greedy_tokens_equal_those_of_transformers(demo_server: Server, demo_folder: Path) -> None:
    reference = Reference(demo_folder)
    prompts = [reference.tokenize(text) for text in PROMPTS]
    expected = [reference.continuations([prompt], NEW_TOKENS)[0] for prompt in prompts]
    assert all(continuation.gap >= GAP_MIN for continuation in expected), "choose other prompts"

    async def scenario() -> None:
        async with connect(demo_server.address, demo_server.admin_address) as gateway:
            requests = [request_of(text, NEW_TOKENS) for text in PROMPTS]
            for reply, continuation in zip(
                await generate_all(gateway, requests), expected, strict=True
            ):
                reply.check()
                assert reply.token_ids == continuation.token_ids
                assert reply.text == reference.text(continuation.token_ids)

    asyncio.run(scenario())
