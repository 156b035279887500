"""The servers that the tests start: which model, how small."""

from __future__ import annotations

from pathlib import Path

from tests.processes.server import Plan

TINY_CONTEXT_LENGTH = 1024
TINY_ROW_COUNT = 16
TINY_BLOCK_COUNT = 40
DEMO_CONTEXT_LENGTH = 2304
"""Of the model's 8192: two prompts of the whole context are computed on two cores."""


def tiny_plan(folder: Path, gateway_count: int, block_count: int = TINY_BLOCK_COUNT) -> Plan:
    """Limits so small that requests queue, prefill in chunks and preempt each other.

    A sequence of 45 prompt and 24 new tokens takes 5 blocks, and 16 of those would need 80 blocks.
    """
    return Plan(
        model_folder=folder,
        model_name="tiny",
        gateway_count=gateway_count,
        scheduler=("--running-max", str(TINY_ROW_COUNT), "--chunk-tokens-max", "32"),
        executor=(
            *("--device", "cpu", "--dtype", "float32", "--threads", "1"),
            *("--row-max", str(TINY_ROW_COUNT), "--token-max", "64"),
            *("--kv-blocks", str(block_count)),
        ),
    )


def demo_plan(folder: Path) -> Plan:
    """The demo model as the recorded cases want it: float32, with room for the whole context."""
    return Plan(
        model_folder=folder,
        model_name="demo",
        scheduler=("--running-max", "16"),
        executor=(
            *("--device", "cpu", "--dtype", "float32", "--threads", "2"),
            *("--row-max", "16", "--token-max", "512", "--kv-blocks", "320"),
            *("--context-length-max", str(DEMO_CONTEXT_LENGTH)),
        ),
    )
