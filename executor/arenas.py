"""Arenas: named memory for weights and KV, got through one seam, `attach(name, size_bytes)`.

Owns where the bytes are. Knows nothing of what stands in them. Called by weights and kv. Today
an arena is plain memory of this process or a file on tmpfs; a process that owns device memory
can take the same place, because who attaches does not care whose memory it is.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

ARENA_MODE: Final = 0o600
_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]*")


class Arenas(Protocol):
    """Where arenas come from."""

    def attach(self, name: str, size_bytes: int) -> Tensor:
        """The arena `name` as a writable uint8 tensor ``[size_bytes]``, the same at each call.

        Its first content is whatever its owner left there; memory nobody wrote yet is arbitrary.

        Raises:
            ValueError: the arena exists with another size.
        """


class PlainArenas:
    """Arenas in this process' own memory on `device`; gone with it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._attached: dict[str, Tensor] = {}

    def attach(self, name: str, size_bytes: int) -> Tensor:
        """See `Arenas.attach`."""
        if name not in self._attached:
            _check(name, size_bytes)
            self._attached[name] = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        arena = self._attached[name]
        _check_size(name, len(arena), size_bytes)
        return arena


class FileArenas:
    """Arenas as files in `folder` (on tmpfs): they outlive the process that attached them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._attached: dict[str, Tensor] = {}

    def attach(self, name: str, size_bytes: int) -> Tensor:
        """See `Arenas.attach`. A new file is created, zeroed and sparse."""
        if name not in self._attached:
            _check(name, size_bytes)
            mapping = _map_file(self._folder / f"arena.{name}", name, size_bytes)
            self._attached[name] = torch.frombuffer(mapping, dtype=torch.uint8)
        arena = self._attached[name]
        _check_size(name, len(arena), size_bytes)
        return arena


def _map_file(path: Path, name: str, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, ARENA_MODE)
    try:
        found = os.fstat(descriptor).st_size
        if found == 0:
            os.ftruncate(descriptor, size_bytes)
        else:
            _check_size(name, found, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def _check(name: str, size_bytes: int) -> None:
    assert _NAME.fullmatch(name), name
    assert size_bytes > 0, size_bytes


def _check_size(name: str, found: int, asked: int) -> None:
    if found != asked:
        raise ValueError(f"arena {name} has {found} bytes, asked for {asked}")
