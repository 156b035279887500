"""Products with fixed weights on a CPU, together with what is done to their result.

Owns the choice between oneDNN's own layout of a weight, which is read about twice as fast by
products of few rows, and the weight as it is. Knows nothing of models. Called by `cpu_decoder`.

A sum that follows a product is computed before the result is rounded and written, where oneDNN
does it.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

PACKED_DTYPES: Final = (torch.float32, torch.bfloat16)


class Product(Protocol):
    """A weight ``[out, in]`` and perhaps a bias ``[out]``, to be multiplied with rows of inputs."""

    def of(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``; ``[rows, in]`` to ``[rows, out]``, as the other."""

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        """`of`, added to `summand`."""


class PlainProduct:
    """A product over the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def of(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        return self.of(x) + summand


class PackedProduct:
    """A product over a copy of the weight in oneDNN's layout.

    The operations are those that torch's own compiler uses for frozen weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def of(self, x: Tensor) -> Tensor:
        product: Tensor = self._unary(x, self._weight, self._bias, "none", [], "")
        return product

    def plus(self, x: Tensor, summand: Tensor) -> Tensor:
        product: Tensor = self._binary(x, summand, self._weight, self._bias, "add")
        return product


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this processor and this build of torch have packed products of `dtype`."""
    if dtype not in PACKED_DTYPES or not torch._C._has_mkldnn:
        return False
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
