"""Gapless' client: the Python API, the `gapless` command and the supervisor behind `gapless serve`.

Owns nothing that a server holds: it speaks gRPC to a gateway and starts processes by their command
lines. Must not know the private messages, the scheduler, the executor or the gateway's code.

::

    from gapless.client import Client

    async with Client("localhost:50051") as client:
        async for delta in client.generate("Once upon a time", max_new_tokens=64):
            print(delta.text, end="", flush=True)

Names are imported when first used, so that ``gapless --help`` does not wait for gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.client.client import Client
    from gapless.client.errors import (
        BugError,
        GaplessError,
        LostError,
        NoServerError,
        RefusedError,
        Violation,
    )
    from gapless.client.requests import GenerateOptions, PromptOptions
    from gapless.client.stream import Generation
    from gapless.client.values import (
        Completed,
        Delta,
        Finish,
        FinishReason,
        HealthStatus,
        ModelInfo,
        ServerStats,
        Started,
        Timing,
        Tokenization,
        Usage,
    )

__all__ = [
    "BugError",
    "Client",
    "Completed",
    "Delta",
    "Finish",
    "FinishReason",
    "GaplessError",
    "GenerateOptions",
    "Generation",
    "HealthStatus",
    "LostError",
    "ModelInfo",
    "NoServerError",
    "PromptOptions",
    "RefusedError",
    "ServerStats",
    "Started",
    "Timing",
    "Tokenization",
    "Usage",
    "Violation",
]

_MODULES = ("client", "errors", "requests", "stream", "values")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module_name in _MODULES:
            module = importlib.import_module(f"gapless.client.{module_name}")
            if getattr(module, name, None) is not None:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
