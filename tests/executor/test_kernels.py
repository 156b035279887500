"""The small kernels against plain torch: in Triton's interpreter, or on a GPU if there is one."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from gapless.executor import kernels

POSITIONS = 50


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    yield
    torch.set_default_device("cpu")


def parts_of(x: Tensor, count: int) -> Tensor:
    """`x` as float32 sums of `count` parts; itself if 1."""
    if count == 1:
        return x
    parts = torch.randn(count, *x.shape)
    parts[-1] += x.float() - parts.sum(0)
    return parts


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.double().chunk(2, dim=-1)
    return x.double() * cosine[:, None] + torch.cat([-second, first], -1) * sine[:, None]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    exact = x.double()
    return exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * weight.double()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("tokens", [3, 65])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 2, 32), (6, 1, 16)])
@pytest.mark.parametrize("norms", [False, True])
def test_rotate_and_store(
    heads: int, kv_heads: int, dim: int, tokens: int, parts: int, *, norms: bool
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    cosines, sines = torch.randn(POSITIONS, dim), torch.randn(POSITIONS, dim)
    positions = torch.randint(0, POSITIONS, (tokens,))
    slots = torch.randperm(200)[:tokens]
    weights = (torch.randn(dim), torch.randn(dim)) if norms else None
    keys, values = torch.full((2, 200, kv_heads, dim), float("nan"))
    queries = kernels.rotate_and_store(
        parts_of(qkv, parts), (cosines, sines), positions, slots, weights, 1e-6, (keys, values)
    )
    q, k, v = torch.split(qkv.view(tokens, -1, dim), [heads, kv_heads, kv_heads], dim=1)
    if weights is not None:
        q, k = normed(q, weights[0]), normed(k, weights[1])
    cosine, sine = cosines[positions].double(), sines[positions].double()
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(queries.double(), rotated(q, cosine, sine))
    close(keys[slots].double(), rotated(k, cosine, sine))
    close(values[slots], v)
    others = torch.ones(200, dtype=torch.bool)
    others[slots] = False
    assert keys[others].isnan().all()
    assert values[others].isnan().all()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("first", [False, True])
def test_add_rms_norm(parts: int, *, first: bool) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
    total = x if first else x + residual
    found = kernels.add_rms_norm(parts_of(x, parts), residual, weight, 1e-6, first=first)
    torch.testing.assert_close(found.double(), normed(total, weight), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(residual, total, rtol=1e-4, atol=1e-4)
