"""The paged KV pool: one tensor over an arena, and how many blocks it should have.

Owns the layout ``[layer, 2, block, block_tokens, kv_heads, head_dim]`` (keys, then values). Knows
nothing of sequences: which block belongs to whom is the scheduler's affair. Block 0 is scratch.
Called at start (sizing, creation) and by attention (`layer`).
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from gapless.executor.arenas import Arenas

KV_ARENA: Final = "kv"
CPU_MEMORY_SHARE: Final = 0.25
"""Share of the memory available at start that the pool may take on a CPU, if nothing is said."""
CPU_MEMORY_LIMIT_BYTES: Final = 4 << 30
"""Most bytes that the pool takes on a CPU, if nothing is said. Untouched pages cost nothing."""
CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
"""Where a container finds its own control group."""


@dataclasses.dataclass(frozen=True, slots=True)
class KvShape:
    """What a model and a block size make of one block."""

    layer_count: int
    kv_head_count: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        per_token = self.kv_head_count * self.head_dim * self.dtype.itemsize
        return 2 * self.layer_count * self.block_tokens * per_token


class KvPool:
    """Keys and values of all blocks, over the arena `KV_ARENA`."""

    def __init__(self, arenas: Arenas, shape: KvShape, block_count: int) -> None:
        assert block_count >= 2, f"a scratch block and one more: {block_count}"
        self.shape = shape
        self.block_count = block_count
        arena = arenas.attach(KV_ARENA, shape.block_bytes * block_count)
        self.tensor = arena.view(shape.dtype).view(
            shape.layer_count,
            2,
            block_count,
            shape.block_tokens,
            shape.kv_head_count,
            shape.head_dim,
        )
        self._layers: list[tuple[Tensor, Tensor]] = []
        for layer in self.tensor.flatten(2, 3):
            keys, values = layer.unbind(0)
            self._layers.append((keys, values))

    @property
    def block_tokens(self) -> int:
        return self.shape.block_tokens

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each ``[block_count * block_tokens, kv_heads, head_dim]``.

        Place of a position: block id times block_tokens, plus the position's place in the block.
        """
        return self._layers[index]


def cpu_block_count(
    shape: KvShape, *, context_length: int, row_max: int, available_bytes: int
) -> int:
    """Blocks of the pool on a CPU: a share of the memory, within a limit.

    Never less than scratch, one sequence of the whole context, and one block for each other row;
    never more than `row_max` whole contexts can use.

    Raises:
        MemoryError: not even the least pool fits the available memory.
    """
    context_blocks = math.ceil(context_length / shape.block_tokens)
    least = 1 + context_blocks + row_max
    most = 1 + context_blocks * row_max
    if least * shape.block_bytes > available_bytes:
        raise MemoryError(
            f"the smallest KV pool for a context of {context_length} tokens takes "
            f"{least * shape.block_bytes} bytes, available are {available_bytes}: "
            "choose a shorter context"
        )
    allowed_bytes = min(int(available_bytes * CPU_MEMORY_SHARE), CPU_MEMORY_LIMIT_BYTES)
    return max(least, min(most, allowed_bytes // shape.block_bytes))


def available_memory_bytes() -> int:
    """Memory that this process can still get: what the kernel estimates (MemAvailable), or less if
    a control group (a container's limit) allows less.

    Raises:
        OSError: there is no /proc/meminfo.
        ValueError: it does not say.
    """
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, _group_memory_bytes(CONTROL_GROUP))
    raise ValueError("/proc/meminfo does not name MemAvailable")


def _group_memory_bytes(group: Path) -> int:
    """What the control group (version 2) at `group` leaves; unlimited if it has no limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return sys.maxsize
    return sys.maxsize if limit == "max" else max(0, int(limit) - used)
