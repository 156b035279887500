"""Which attention kernels are chosen, and how torch's own is called: neither needs a GPU."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gapless.executor.attention_backends import (
    GATHER,
    VARLEN,
    available_backends,
    make_attention,
    torch_has_paged_varlen,
)
from gapless.executor.cuda_attention import Gathered, HeadShape, StepRows
from gapless.executor.flash_attention import TorchVarlen
from gapless.executor.flashinfer_attention import workspace_bytes
from gapless.executor.kv import KvPool, KvShape
from gapless.protos.executor_flags import ATTENTIONS

HEADS = HeadShape(8, 2, 64, torch.bfloat16)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Lets torch find a GPU of a capability; nothing runs on it."""

    def there_is(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return there_is


def installed(dtype: torch.dtype, dim: int = 64, block_tokens: int = 256) -> tuple[str, ...]:
    heads = HeadShape(8, 2, dim, dtype)
    return available_backends(heads, windows=True, block_tokens=block_tokens)


def test_without_a_gpu_torch_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not torch_has_paged_varlen()
    assert installed(torch.bfloat16)[-1] == GATHER
    assert VARLEN not in installed(torch.bfloat16)


def test_the_kernel_of_torch_comes_before_the_gather(
    gpu: Callable[[tuple[int, int]], None],
) -> None:
    gpu((9, 0))
    if not torch_has_paged_varlen():
        pytest.skip(f"torch {torch.__version__} has no varlen_attn with a block table")
    assert installed(torch.bfloat16)[-2:] == (VARLEN, GATHER)
    assert installed(torch.float16, dim=96, block_tokens=512)[-2:] == (VARLEN, GATHER)
    for unfit in (
        installed(torch.float32),
        installed(torch.bfloat16, dim=260),
        installed(torch.bfloat16, dim=512),
        installed(torch.bfloat16, block_tokens=16),
    ):
        assert VARLEN not in unfit
    gpu((7, 5))
    assert VARLEN not in installed(torch.bfloat16)


def test_an_older_torch_is_recognised(
    gpu: Callable[[tuple[int, int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu((9, 0))
    varlen = importlib.import_module("torch.nn.attention.varlen")

    def of_an_older_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query

    monkeypatch.setattr(varlen, "varlen_attn", of_an_older_torch)
    assert not torch_has_paged_varlen()


def test_every_backend_has_its_option() -> None:
    assert set(installed(torch.bfloat16)) <= set(ATTENTIONS)
    assert VARLEN in ATTENTIONS


@pytest.mark.parametrize(
    ("queries", "window", "called_with"),
    [
        ((1, 1, 1), None, (1, (-1, -1))),
        ((1, 1, 1), 100, (1, (99, 0))),
        ((5, 1, 300), None, (300, (-1, 0))),
        ((5, 1, 300), 100, (300, (99, 0))),
    ],
)
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_how_torch_is_called(
    queries: tuple[int, ...],
    window: int | None,
    called_with: tuple[int, tuple[int, int]],
    kv_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shapes go through torch's own checks of arguments, with tensors that hold nothing."""
    varlen = importlib.import_module("torch.nn.attention.varlen")
    original = varlen.varlen_attn
    if "block_table" not in inspect.signature(original).parameters:
        pytest.skip(f"torch {torch.__version__} has no varlen_attn with a block table")
    calls: list[tuple[Any, ...]] = []

    def remember(*arguments: Any, **named: Any) -> Tensor:
        calls.append((arguments, named))
        output: Tensor = original(*arguments, **named)
        return output

    monkeypatch.setattr(varlen, "varlen_attn", remember)
    rows, tokens, width = len(queries), sum(queries), 3
    heads = HeadShape(8, kv_heads, 64, torch.bfloat16)
    device = torch.device("cuda")
    with FakeTensorMode():
        pool = KvPool(_Arenas(device), KvShape(1, kv_heads, 64, 256, torch.bfloat16), 11)
        scratch = torch.empty(0, device=device)
        attention = make_attention(VARLEN, pool, heads, scratch, rows, tokens, captured=False)
        assert isinstance(attention, TorchVarlen)
        attention.plan(np.array(queries, np.int32), np.array(queries, np.int32) + 400)
        attention.bind(
            StepRows(
                query_indptr=numbers(torch.int32, rows + 1),
                context_lengths=numbers(torch.int32, rows),
                block_tables=numbers(torch.int32, rows, width),
                write_slots=numbers(torch.int64, tokens),
                token_rows=numbers(torch.int64, tokens),
                positions=numbers(torch.int64, tokens),
            )
        )
        query = torch.empty(tokens, 8, 64, dtype=torch.bfloat16, device=device)
        key = torch.empty(tokens, kv_heads, 64, dtype=torch.bfloat16, device=device)
        output = attention.attend(0, query, key, key, 0.125, window)
        assert output.shape == query.shape
        assert output.dtype == query.dtype
    ((arguments, named),) = calls
    _, keys, values, query_indptr, key_indptr, query_max, key_max = arguments
    assert keys.shape == values.shape == (11, 256, kv_heads, 64)
    assert query_indptr.shape == key_indptr.shape == (rows + 1,)
    assert query_indptr.dtype == key_indptr.dtype == torch.int32
    assert (query_max, named["window_size"]) == called_with
    assert key_max == width * 256
    assert named["enable_gqa"] == (kv_heads == 2)
    assert named["seqused_k"].shape == (rows,)
    assert named["block_table"].shape == (rows, width)
    assert named["scale"] == 0.125


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def test_blocks_that_the_kernel_does_not_take_are_our_mistake() -> None:
    pool = KvPool(_Arenas(torch.device("cpu")), KvShape(1, 2, 64, 16, torch.bfloat16), 4)
    with pytest.raises(AssertionError, match="16"):
        TorchVarlen(pool)
    made = make_attention(GATHER, pool, HEADS, torch.empty(0), 1, 1, captured=False)
    assert isinstance(made, Gathered)


class _Arenas:
    """Arenas of whatever tensors the mode in force makes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def attach(self, name: str, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "captured", "mib"),
    [
        (32, 8, 128, [(256, 256), (64, 1024)], 256),
        (32, 8, 128, [(256, 256)], 256),
        (32, 8, 128, [], 256),
        (32, 1, 128, [(256, 256)], 533),  # not captured: 128 queries a tile, 264 tiles
        (32, 1, 256, [(256, 256)], 769),  # 64 queries a tile, 383 tiles
        (64, 4, 128, [(256, 256)], 267),  # not captured: 128 queries, 66 tiles
    ],
)
def test_flashinfer_has_room_for_what_its_planner_may_ask(
    heads: int, kv_heads: int, dim: int, captured: list[tuple[int, int]], mib: int
) -> None:
    shape = HeadShape(heads, kv_heads, dim, torch.bfloat16)
    found = workspace_bytes(shape, 132, captured)
    assert found >> 20 == mib
