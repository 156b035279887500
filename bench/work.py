"""The work of a benchmark: which requests, and how the server is warmed up for them.

Owns how prompts are drawn; everything comes from fixed seeds, so each run has the same work.
Knows nothing of processes. Called by `__main__`.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

SEED: Final = 0
MIXED_RUNNING_MAX: Final = 256
MIXED_VOCABULARY: Final = 128_000
STEPS_A_ROW_COUNT: Final = 2
"""Warm-up steps at each number of rows: one in each slot."""


class WorkError(Exception):
    """The work cannot be done; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request; greedy, without end tokens."""

    prompt: Tokens
    new_tokens: int

    @property
    def length(self) -> int:
        return len(self.prompt) + self.new_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Requests that are all there at the start."""

    fields: dict[str, Any]
    """How the results name it."""
    requests: tuple[Request, ...]
    running_max: int
    """Most that run at once."""

    @property
    def new_tokens(self) -> int:
        return sum(request.new_tokens for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def length_max(self) -> int:
        """Longest prompt plus output."""
        return max(request.length for request in self.requests)

    def warm_up(self, vocab_size: int) -> Work:
        """Other prompts of the same lengths, whose rows become fewer one by one.

        Whatever an executor prepares for a number of rows when it first meets it is prepared then.
        """
        first = self.requests[: self.running_max]
        requests = tuple(
            Request((request.prompt + 1) % vocab_size, STEPS_A_ROW_COUNT * (k + 1))
            for k, request in enumerate(first)
        )
        return Work({"name": "warm-up"}, requests, self.running_max)


def batch(count: int, prompt_tokens: int, new_tokens: int, vocab_size: int) -> Work:
    """`count` requests of one size, all of which run at once."""
    draw = np.random.default_rng(SEED)
    prompts = draw.integers(0, vocab_size, (count, prompt_tokens), dtype=np.int32)
    requests = tuple(Request(prompt, new_tokens) for prompt in prompts)
    return Work({"batch": count, "prompt": prompt_tokens, "new": new_tokens}, requests, count)


def mixed(count: int, vocab_size: int) -> Work:
    """Prompts of 128 to 896 tokens, outputs of 64 to 448, at most 256 running."""
    draw = random.Random(SEED)
    requests = []
    for _ in range(count):
        prompt_tokens, new_tokens = draw.randint(128, 896), draw.randint(64, 448)
        prompt = [draw.randrange(10, MIXED_VOCABULARY) % vocab_size for _ in range(prompt_tokens)]
        requests.append(Request(np.array(prompt, np.int32), new_tokens))
    running_max = min(MIXED_RUNNING_MAX, count)
    fields = {"name": "mixed", "requests": count, "running": running_max}
    return Work(fields, tuple(requests), running_max)


def from_file(path: Path, vocab_size: int) -> Work:
    """Requests of a file, one JSON object a line: ``{"prompt": 256, "new": 64}``.

    `prompt` is a number of tokens or a list of ids.

    Raises:
        WorkError: a line is not like that.
    """
    draw = np.random.default_rng(SEED)
    requests = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line), vocab_size, draw))
        except (ValueError, TypeError, KeyError) as error:
            raise WorkError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    if not requests:
        raise WorkError(f"{path} has no request")
    running_max = min(MIXED_RUNNING_MAX, len(requests))
    fields = {"name": path.stem, "requests": len(requests), "running": running_max}
    return Work(fields, tuple(requests), running_max)


def _request(fields: dict[str, Any], vocab_size: int, draw: np.random.Generator) -> Request:
    prompt, new_tokens = fields["prompt"], fields["new"]
    if isinstance(prompt, int):
        tokens = draw.integers(0, vocab_size, prompt, dtype=np.int32)
    else:
        tokens = np.array(prompt, np.int32)
    if tokens.ndim != 1 or not len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"prompt is no list of ids below {vocab_size}")
    if not isinstance(new_tokens, int) or new_tokens < 1:
        raise ValueError(f"new is {new_tokens!r}")
    return Request(tokens, new_tokens)
