"""Where the product and its tests stand, for the tests that read source files."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("protos", "gateway", "scheduler", "executor", "client", "bench")


def sources(folder: str) -> list[Path]:
    """Hand-written Python files below a top-level folder."""
    return sorted(path for path in (REPOSITORY / folder).rglob("*.py") if "_pb2" not in path.name)


def product_sources() -> list[Path]:
    return [path for room in ROOMS for path in sources(room)]


def all_sources() -> list[Path]:
    return [*product_sources(), *sources("tests")]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def shown(path: Path, line: int | None = None) -> str:
    """`path` as a reader of the repository names it."""
    where = str(path.relative_to(REPOSITORY))
    return where if line is None else f"{where}:{line}"
