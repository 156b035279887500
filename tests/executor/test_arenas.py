"""Arenas, and what is laid out in them: weights and the KV pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gapless.executor import weights
from gapless.executor.arenas import Arenas, FileArenas, PlainArenas
from gapless.executor.kv import (
    CPU_MEMORY_LIMIT_BYTES,
    CPU_MEMORY_SHARE,
    KvPool,
    KvShape,
    available_memory_bytes,
    cpu_block_count,
)
from tests.executor.steps import CPU

torch.set_num_threads(1)


@pytest.fixture(params=["plain", "file"])
def arenas(request: pytest.FixtureRequest, tmp_path: Path) -> Arenas:
    return PlainArenas(CPU) if request.param == "plain" else FileArenas(tmp_path)


class Odd(nn.Module):
    """Tied weights, odd sizes, several dtypes, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3, dtype=torch.bfloat16)
        self.inner = nn.Linear(3, 5, dtype=torch.float64)
        self.head = nn.Linear(3, 7, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(11))
        self.register_buffer("flag", torch.tensor(True), persistent=False)


def test_an_arena_keeps_its_content_and_its_size(arenas: Arenas) -> None:
    first = arenas.attach("weights", 1000)
    first.copy_(torch.arange(1000) % 256)
    assert torch.equal(arenas.attach("weights", 1000), first)
    assert first.dtype == torch.uint8
    other = arenas.attach("kv", 10)
    other.fill_(9)
    assert arenas.attach("weights", 1000)[0] == 0
    with pytest.raises(ValueError, match="arena weights has 1000 bytes, asked for 999"):
        arenas.attach("weights", 999)


def test_a_file_arena_outlives_who_attached_it(tmp_path: Path) -> None:
    FileArenas(tmp_path).attach("kv", 5000).fill_(7)
    later = FileArenas(tmp_path)
    assert (later.attach("kv", 5000) == 7).all()
    with pytest.raises(ValueError, match="arena kv has 5000 bytes"):
        FileArenas(tmp_path).attach("kv", 6000)


def test_weights_move_into_the_arena_whole(arenas: Arenas) -> None:
    module = Odd()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    layout = weights.plan_weights(module)
    weights.fill(module, layout, arenas)
    arena = arenas.attach(weights.WEIGHT_ARENA, layout.size_bytes)

    names = [placed.name for placed in layout.tensors]
    assert names == ["embedding.weight", "inner.weight", "inner.bias", "table", "flag"]
    end = 0
    for placed in layout.tensors:
        assert placed.offset_bytes % 256 == 0
        assert placed.offset_bytes >= end, "no overlap"
        end = placed.offset_bytes + placed.size_bytes
    assert end <= layout.size_bytes

    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for placed in layout.tensors:
        address = arena.data_ptr() + placed.offset_bytes
        assert tensors[placed.name].data_ptr() == address, placed.name
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert module.head.weight.data_ptr() == module.embedding.weight.data_ptr()


def test_a_later_module_binds_to_a_filled_arena(tmp_path: Path) -> None:
    first, second = Odd(), Odd()
    layout = weights.plan_weights(first)
    weights.fill(first, layout, FileArenas(tmp_path))
    assert not torch.equal(first.inner.weight, second.inner.weight)
    weights.bind(second, weights.plan_weights(second), FileArenas(tmp_path))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert second.head.weight is second.embedding.weight


SHAPE = KvShape(layer_count=2, kv_head_count=3, head_dim=5, block_tokens=4, dtype=torch.float32)


def test_the_pool_views_its_arena_in_the_stated_layout(arenas: Arenas) -> None:
    assert SHAPE.block_bytes == 2 * 2 * 4 * 3 * 5 * 4
    pool = KvPool(arenas, SHAPE, block_count=6)
    assert pool.tensor.shape == (2, 2, 6, 4, 3, 5)
    pool.tensor.zero_()
    keys, values = pool.layer(1)
    keys[5 * 4 + 3, 2, 4] = 1.0
    values[0, 0, 0] = 2.0
    assert pool.tensor[1, 0, 5, 3, 2, 4] == 1.0
    assert pool.tensor[1, 1, 0, 0, 0, 0] == 2.0
    assert pool.tensor.count_nonzero() == 2
    again = KvPool(arenas, SHAPE, block_count=6)
    assert again.tensor.data_ptr() == pool.tensor.data_ptr()


def count(available_bytes: int, *, context_length: int = 100, row_max: int = 8) -> int:
    return cpu_block_count(
        SHAPE, context_length=context_length, row_max=row_max, available_bytes=available_bytes
    )


def test_the_pool_takes_a_share_of_the_memory_within_limits() -> None:
    least, most = 1 + 25 + 8, 1 + 25 * 8
    block = SHAPE.block_bytes
    assert count(least * block) == least, "a tight machine: one context and a block a row"
    assert count(int(100 * block / CPU_MEMORY_SHARE)) == 100
    assert count(2**50) == most, "no more than all rows can use"
    wide = count(2**50, context_length=10**8)
    assert wide == 1 + 25_000_000 + 8, "never less than one context"
    limited = count(2**50, context_length=10**6, row_max=10**4)
    assert limited == CPU_MEMORY_LIMIT_BYTES // block
    with pytest.raises(MemoryError, match="smallest KV pool"):
        count(least * block - 1)


def test_the_kernel_says_how_much_memory_there_is() -> None:
    assert available_memory_bytes() > 2**20


def test_a_container_may_allow_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.executor.kv.CONTROL_GROUP", tmp_path)
    unlimited = available_memory_bytes()
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_memory_bytes() == 400
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes() == pytest.approx(unlimited, rel=0.5)
