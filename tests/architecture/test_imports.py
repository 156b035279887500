"""Who may import what: the contracts of pyproject.toml, and the positive list behind them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.architecture import tree

MAY_IMPORT: Final[dict[str, set[str]]] = {
    "protos": {"msgspec", "numpy"},
    "gateway": {
        "google",
        "grpc",
        "grpc_health",
        "grpc_reflection",
        "grpc_status",
        "jinja2",
        "msgspec",
        "numpy",
        "tokenizers",
        "transformers",
        "zmq",
    },
    "scheduler": {"msgspec", "numpy", "zmq"},
    "executor": {
        "gguf",
        "huggingface_hub",
        "msgspec",
        "numpy",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
        "triton",
        "zmq",
    },
    "bench": {"gapless.client", "grpc", "msgspec", "numpy", "zmq"},
    "client": {"google", "grpc", "grpc_health", "grpc_status"},
}
"""Packages beyond the standard library, the contract folder and the room itself."""


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file names, those imported inside functions included."""
    for node in ast.walk(tree.parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{tree.shown(path, node.lineno)}: name modules in full"
            assert node.module is not None
            if node.module == "gapless":
                yield from ((f"gapless.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


@pytest.mark.parametrize("room", tree.ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    allowed = MAY_IMPORT[room] | {f"gapless.{room}", "gapless.protos"} | sys.stdlib_module_names
    broken = []
    for path in tree.sources(room):
        for name, line in imported_names(path):
            parts = name.split(".")
            head = ".".join(parts[:2]) if parts[0] == "gapless" else parts[0]
            if head not in allowed:
                broken.append(f"{tree.shown(path, line)} imports {name}")
    assert broken == []


def test_only_grpc_speakers_import_the_stubs() -> None:
    broken = [
        f"{tree.shown(path, line)} imports {name}"
        for room in ("protos", "scheduler", "executor")
        for path in tree.sources(room)
        for name, line in imported_names(path)
        if "_pb2" in name
    ]
    assert broken == []


def test_tests_use_the_package_names() -> None:
    """Bare `scheduler` or `executor` would be other projects' packages."""
    broken = [
        f"{tree.shown(path, line)} imports {name}"
        for path in tree.all_sources()
        for name, line in imported_names(path)
        if name.split(".")[0] in tree.ROOMS
    ]
    assert broken == []


def test_import_contracts_are_kept() -> None:
    """Direct and indirect imports, by import-linter; `lint-imports` shows the same."""
    found = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=tree.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
