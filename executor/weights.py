"""Weights in an arena: where each parameter and buffer stands, copying them there, binding to it.

Owns the layout (names in order, 256-byte borders, shared tensors once). Knows nothing of the
model's meaning. Called once, when a model has been loaded. `fill` is what the first executor does;
`bind` alone is enough for a later one that finds the arena filled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from gapless.executor.arenas import Arenas

WEIGHT_ARENA: Final = "weights"
ALIGNMENT_BYTES: Final = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """Where one tensor stands in the arena."""

    name: str
    """The first name of the tensor; tied names are not listed."""
    offset_bytes: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class WeightLayout:
    """All tensors of a model in one arena. Depends on the model's structure alone."""

    tensors: tuple[Placed, ...]
    size_bytes: int


def plan_weights(module: nn.Module) -> WeightLayout:
    """Lays out parameters, then buffers, each once."""
    placed: list[Placed] = []
    end = 0
    for name, tensor in _tensors(module):
        size_bytes = tensor.numel() * tensor.element_size()
        placed.append(Placed(name, end, size_bytes))
        end += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return WeightLayout(tuple(placed), end)


def fill(module: nn.Module, layout: WeightLayout, arenas: Arenas) -> None:
    """Copies the module's tensors into the arena, then binds the module to it."""
    arena = arenas.attach(WEIGHT_ARENA, layout.size_bytes)
    for (name, tensor), placed in zip(_tensors(module), layout.tensors, strict=True):
        assert name == placed.name, (name, placed.name)
        _view(arena, placed, tensor).copy_(tensor.detach())
    bind(module, layout, arenas)


def bind(module: nn.Module, layout: WeightLayout, arenas: Arenas) -> None:
    """Makes the module's tensors views on the arena; what they held before is let go."""
    arena = arenas.attach(WEIGHT_ARENA, layout.size_bytes)
    for (name, tensor), placed in zip(list(_tensors(module)), layout.tensors, strict=True):
        assert name == placed.name, (name, placed.name)
        tensor.data = _view(arena, placed, tensor)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Named parameters and buffers, each object once: tied weights are one parameter."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _view(arena: Tensor, placed: Placed, tensor: Tensor) -> Tensor:
    part = arena[placed.offset_bytes : placed.offset_bytes + placed.size_bytes]
    if not placed.size_bytes:
        return torch.empty_like(tensor)
    return part.view(tensor.dtype).view(tensor.shape)
