"""Tests here need a CUDA device; elsewhere they are skipped, each saying why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))
