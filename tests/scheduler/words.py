"""Words and limits for tests of the core, with everything a test does not care about filled in."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gapless.protos.messages import Event, Handle, Stopping, Submit, Update
from gapless.protos.sampling import Sampling
from gapless.protos.slots import Frame, Result
from gapless.scheduler.config import SAMPLING_WORDS_MAX, CoreConfig, GatewayIndex

GATEWAY = GatewayIndex(1)


def config(**changes: Any) -> CoreConfig:
    """Four seats, ten usable blocks of four tokens."""
    numbers: dict[str, Any] = {
        "running_max": 4,
        "queued_max": 8,
        "step_tokens_max": 16,
        "chunk_tokens_max": 8,
        "row_max": 4,
        "block_tokens": 4,
        "block_count": 11,
        "context_length": 64,
        "vocab_size": 100,
    }
    numbers |= changes
    blocks = -(-numbers["context_length"] // numbers["block_tokens"])
    numbers.setdefault("assignment_max", numbers["running_max"] + SAMPLING_WORDS_MAX + blocks)
    return CoreConfig(**numbers)


def submit(handle: int, prompt_tokens: int = 5, **changes: Any) -> Submit:
    """A request; the fields of `Stopping` and `Sampling` may be named directly."""
    stopping = {name: changes.pop(name) for name in Stopping.__struct_fields__ if name in changes}
    stopping.setdefault("max_new_tokens", 4)
    sampling = {name: changes.pop(name) for name in Sampling.__struct_fields__ if name in changes}
    sampling.setdefault("temperature", 0.0)
    changes.setdefault("request_id", f"r{handle}")
    changes.setdefault("tenant", "")
    return Submit(
        handle=Handle(handle),
        prompt=np.arange(1, prompt_tokens + 1, dtype=np.int32).tobytes(),
        sampling=Sampling(**sampling),
        stopping=Stopping(**stopping),
        received_s=0.0,
        **changes,
    )


def result_of(frame: Frame, token: int = 7) -> Result:
    """The result of a frame: `token` in every row."""
    return Result(
        epoch=frame.epoch,
        step=frame.step,
        tokens=np.full(frame.row_count, token, np.int32),
        faults=np.zeros(frame.row_count, np.int32),
        accepted_ns=0,
        started_ns=0,
        finished_ns=1_000_000,
    )


def events_of(updates: dict[GatewayIndex, Update]) -> list[Event]:
    """All events of all gateways, in order."""
    return [event for update in updates.values() for event in update.events]


def tokens_of(updates: dict[GatewayIndex, Update]) -> list[tuple[int, int]]:
    """All (handle, token) pairs, in order."""
    pairs: list[tuple[int, int]] = []
    for update in updates.values():
        handles = np.frombuffer(update.handles, np.int64).tolist()
        tokens = np.frombuffer(update.tokens, np.int32).tolist()
        pairs += zip(handles, tokens, strict=True)
    return pairs


def with_token(result: Result, row: int, token: int) -> Result:
    """`result` with another token in one row."""
    tokens = result.tokens.copy()
    tokens[row] = token
    return dataclasses.replace(result, tokens=tokens)
